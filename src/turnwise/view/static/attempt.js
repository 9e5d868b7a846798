// One attempt: the dialogue with its tools and rewards, tokens on demand, and the group as a tree.
(() => {
"use strict";
const { h, s } = tw;
const ICONS = { system: "system", user: "env", assistant: "model", tool: "tool" };

tw.pages.attempt = async (root, { parts, values }) => {
  const run = parts[0], id = Number(parts[1]);
  const [attempt, group] = await Promise.all([tw.ask("attempt", { run, id }), tw.ask("group", { run, id })]);
  tw.crumbs(["Runs", "#/"], [run, tw.go(["run", run])], ["Attempts", tw.go(["attempts"], { run })], [`#${id}`]);
  const { row } = attempt;
  const state = { view: values.tokens || "" };
  const dialogue = h("div", { class: "dialogue" });
  const draw = () => {
    dialogue.replaceChildren(...attempt.start.map((message) => tw.message(message)), ...attempt.turns.map((turn, index) => tw.turnBlock(turn, index, state.view, attempt)));
    if (attempt.failure) dialogue.append(h("div", { class: "finding error" }, h("b", {}, `failed: ${attempt.failure.party}`), h("pre", {}, attempt.failure.traceback || attempt.failure.detail)));
    else if (attempt.end_meaning) dialogue.append(h("p", { class: "end" }, `${row.end_reason.replace("_", " ")}: ${attempt.end_meaning}`));
  };
  const hasTokens = attempt.turns.some((turn) => turn.tokens);
  root.append(
    h("div", { class: "title" }, h("h1", { tabindex: -1 }, `Attempt #${id}`), tw.verdict(row.is_success, row.end_reason), tw.pill(`reward ${tw.num(row.reward)}`), tw.pill(row.outcome === "trained" || row.outcome === "evaluated" ? row.outcome : `not trained: ${row.outcome}`, row.outcome === "trained" ? "live" : "")),
    h("p", { class: "sub" }, `${row.task_id} · step ${row.step} · ${row.phase} · ${tw.plural(row.num_turns, "turn")} · ${tw.plural(row.num_sampled_tokens, "token")} · ${tw.duration(attempt.duration_s)} · seed ${attempt.seed}`),
    siblings(run, id, group),
    h("div", { class: "attempt-page" }, h("div", {}, hasTokens ? tw.tokenTools(state, draw, [attempt]) : null, dialogue), aside(run, attempt, group)));
  draw();
  return { runs: () => [run] };
};

const siblings = (run, id, group) => {
  const all = group.attempts, at = all.findIndex((one) => one.id === id);
  const rewards = all.map((one) => one.reward), low = Math.min(...rewards), high = Math.max(...rewards);
  const next = all[at + 1] || all[0], previous = all[at - 1] || all[all.length - 1];
  const others = h("select", { "aria-label": "Compare with", onchange: (event) => { location.hash = tw.go(["pair", run, id, event.target.value]); } });
  tw.options(others, [["", "compare with …"], ...all.filter((one) => one.id !== id).map((one) => [String(one.id), `#${one.id}, reward ${tw.num(one.reward)}`])], "");
  return h("div", { class: "siblings" }, h("span", { class: "note" }, `group of ${all.length}`), tw.strip(run, all, id, low, high), h("span", { class: "grow" }),
    all.length > 1 ? [h("a", { class: "button", "data-key": "previous", href: tw.go(["attempt", run, previous.id]), title: "Previous attempt of the group ([)" }, "‹"),
      h("a", { class: "button", "data-key": "next", href: tw.go(["attempt", run, next.id]), title: "Next attempt of the group (])" }, "›"),
      h("a", { hidden: true, "data-key": "compare", href: tw.go(["pair", run, id, next.id]) }), others] : null);
};

// A number that was not recorded cannot be chosen; its button says why.
const ABSENT = { value: "Not recorded: the method has no critic. method=ppo has one.", trainer: "Not recorded: the attempt was not trained on.", gap: "Not recorded: the attempt was not trained on.", advantage: "Not recorded: the attempt was not trained on." };
tw.tokenTools = (state, draw, attempts) => {
  const isThere = ([, , , get]) => attempts.some((attempt) => attempt.turns.some((turn) => turn.tokens && turn.tokens.ids.some((_, i) => (get(turn.tokens, i) ?? null) !== null)));
  const make = (entry) => {
    const [name, label, meaning] = entry, has = isThere(entry);
    return h("button", { type: "button", "aria-pressed": String(state.view === name), disabled: !has, title: has ? meaning : ABSENT[name], onclick: () => set(name) }, label);
  };
  const place = h("div", { class: "token-tools" }), note = h("span", { class: "note" });
  const set = (name) => { state.view = state.view === name ? "" : name; fill(); draw(); };
  const fill = () => {
    const entry = tw.TOKEN_VIEWS.find(([name]) => name === state.view);
    note.textContent = entry ? entry[2] : "colour the tokens by a number";
    place.replaceChildren(h("div", { class: "segmented", role: "group", "aria-label": "Colour tokens by" }, tw.TOKEN_VIEWS.map(make)), note);
  };
  fill();
  return place;
};

const arguments_ = (call) => Object.entries(call.arguments).map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
tw.message = (message, more) => h("article", { class: `message ${message.role}`, "aria-label": `${ICONS[message.role]}${message.name ? ` ${message.name}` : ""}` },
  h("header", {}, h("b", {}, ICONS[message.role]), message.name ? h("code", {}, message.name) : null, more ? more.head : null),
  more && more.body ? more.body : message.content ? h("div", { class: "text" }, message.content) : null,
  message.tool_calls.map((call) => h("div", { class: "call" }, h("b", {}, call.name), h("code", {}, arguments_(call)))),
  (message.images || []).map( // data: addresses, for worlds that keep what they show
    (image) => h("img", { src: image, alt: "screenshot of the world" })),
  more ? more.foot : null);

const sum = (parts) => Object.values(parts).reduce((total, value) => total + value, 0);
const rewardChips = (turn) => {
  const parts = Object.entries(turn.reward_parts);
  const shaped = turn.credited_parts && sum(turn.credited_parts) !== sum(turn.reward_parts) ? h("span", { class: "chip", title: `after shaping: ${JSON.stringify(turn.credited_parts)}` }, `after shaping ${tw.signed(sum(turn.credited_parts))}`) : null;
  return [parts.filter(([, value]) => value !== 0 || parts.length === 1).map(([name, value]) => h("span", { class: `chip ${value > 0 ? "good" : value < 0 ? "bad" : ""}` }, `${name} ${tw.signed(value)}`)), shaped];
};
tw.advantageChip = (turn, whose = "") => {
  if (!turn.tokens || !turn.tokens.mask.some(Boolean)) return null;
  const known = turn.tokens.advantage.filter((_, i) => turn.tokens.mask[i]);
  const mean = known.reduce((total, value) => total + value, 0) / known.length;
  return h("span", { class: `chip advantage ${mean > 0 ? "good" : mean < 0 ? "bad" : ""}`, title: "mean over the turn's trained tokens" }, `${whose}advantage ${tw.signed(mean)}`);
};
tw.turnBlock = (turn, index, view, attempt, partsAt = null, name = null) => {
  const isShared = attempt.branch && index < attempt.branch.turn;
  const most = view ? tw.largest(attempt.turns, view) : 1;
  const isText = !view || !turn.tokens;
  const head = [name ? h("span", { class: "chip" }, name) : null, h("span", { class: "note" }, `turn ${index + 1}`), h("span", { class: "grow" }), isShared ? h("span", { class: "chip" }, "shared by the group") : null,
    turn.is_cut ? h("span", { class: "chip bad" }, "cut by max_tokens") : null, turn.is_unparsable ? h("span", { class: "chip bad" }, "the env could not read it") : null, turn.is_trained ? null : h("span", { class: "chip" }, "not trained"), rewardChips(turn), tw.advantageChip(turn),
    h("span", { class: "chip", title: `temperature ${turn.temperature}` }, `v${turn.policy_version}`)];
  const foot = turn.tokens ? h("details", { class: "more", ontoggle: (event) => { if (event.target.open && !event.target.querySelector("table")) event.target.append(tw.tokenTable(turn)); } },
    h("summary", {}, `${tw.plural(turn.tokens.ids.length, "token")} after a prompt of ${turn.tokens.num_prompt.toLocaleString("en")}`)) : null;
  const rewritten = turn.tokens && turn.tokens.is_rewritten ? h("p", { class: "note rewritten", title: "memory left out earlier turns, or the chat format changed them; a new datum starts here" }, `the prompt was rewritten here: ${turn.tokens.num_prompt.toLocaleString("en")} tokens`) : null;
  return h("section", { class: `turn${isShared ? " shared" : ""}`, "aria-label": `turn ${index + 1}` }, rewritten,
    tw.message(turn.reply, { head, body: isText ? null : tw.tokenText(turn, view, most, partsAt), foot }),
    turn.observation.map((message) => tw.message(message)));
};

const aside = (run, attempt, group) => h("aside", {},
  tw.card("Group", group.nodes.length ? "who said the same shares a line" : null, tw.tree(run, group, attempt.row.id)),
  Object.keys({ ...attempt.metrics, ...attempt.labels }).length ? tw.card("The world's numbers", null, h("dl", { class: "facts" }, Object.entries(attempt.metrics).map(([name, value]) => [h("dt", {}, name), h("dd", {}, tw.num(value))]), Object.entries(attempt.labels).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))) : null,
  attempt.task ? tw.card("Task", null, h("pre", { class: "task" }, JSON.stringify(attempt.task, null, 1))) : null,
  attempt.missing.length ? tw.card("Not shown", null, h("ul", { class: "plain" }, attempt.missing.map((text) => h("li", {}, text)))) : null);

// --- the tree of a group: turns from left to right, an attempt's end at the right, coloured by reward

tw.tree = (run, group, current) => {
  const { nodes } = group;
  if (!nodes.length) return h("p", { class: "empty" }, "No turns are stored.");
  const children = new Map(nodes.map((node) => [node.id, []]));
  const roots = [];
  for (const node of nodes) (node.parent === null ? roots : children.get(node.parent)).push(node);
  const order = [];
  const walk = (node) => {
    const below = children.get(node.id), inside = new Set(below.flatMap((one) => one.attempts));
    below.forEach(walk);
    for (const id of node.attempts) if (!inside.has(id)) order.push(id);
  };
  roots.forEach(walk);
  const reward = new Map(group.attempts.map((one) => [one.id, one]));
  const rewards = group.attempts.map((one) => one.reward), low = Math.min(...rewards), high = Math.max(...rewards);
  const rowHeight = 20, depth = Math.max(...nodes.map((node) => node.turn)) + 1, columnWidth = Math.max(18, Math.min(56, 200 / depth));
  const width = 24 + depth * columnWidth + 96, height = order.length * rowHeight + 26;
  const y = new Map(order.map((id, index) => [id, 22 + (index + 0.5) * rowHeight]));
  const middle = (node) => node.attempts.reduce((total, id) => total + y.get(id), 0) / node.attempts.length;
  const x = (turn) => 14 + turn * columnWidth;
  const svg = s("svg", { class: "tree", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `Tree of ${group.attempts.length} attempts` });
  for (let turn = 0; turn < depth; turn += Math.ceil(depth / 8)) svg.append(s("text", { x: x(turn), y: 11, class: "head", "text-anchor": "middle" }, turn + 1));
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const isOn = (node) => node.attempts.includes(current);
  const curve = (x0, y0, x1, y1, on) => s("path", { d: `M${x0},${y0}C${(x0 + x1) / 2},${y0} ${(x0 + x1) / 2},${y1} ${x1},${y1}`, class: on ? "edge on" : "edge" });
  for (const node of nodes) {
    if (node.parent !== null) svg.append(curve(x(node.turn - 1), middle(byId.get(node.parent)), x(node.turn), middle(node), isOn(node)));
    const inside = new Set(children.get(node.id).flatMap((one) => one.attempts));
    for (const id of node.attempts) if (!inside.has(id)) svg.append(curve(x(node.turn), middle(node), 24 + depth * columnWidth, y.get(id), id === current));
  }
  for (const node of nodes) {
    svg.append(s("circle", { cx: x(node.turn), cy: middle(node), r: node.attempts.length > 1 ? 4.5 : 3, class: isOn(node) ? "node on" : "node" },
      s("title", {}, `turn ${node.turn + 1}, ${tw.plural(node.attempts.length, "attempt")}: ${node.text}`)));
  }
  for (const id of order) {
    const one = reward.get(id), left = 24 + depth * columnWidth;
    svg.append(s("a", { href: tw.go(["attempt", run, id]), class: id === current ? "leaf on" : "leaf", "aria-label": `attempt ${id}, reward ${tw.num(one.reward)}` },
      s("rect", { x: left - 4, y: y.get(id) - 9, width: 96, height: 18, rx: 4, class: "hit" }),
      s("circle", { cx: left + 4, cy: y.get(id), r: 4.5, style: { fill: tw.rewardColor(one.reward, low, high, one.is_success) } }),
      s("text", { x: left + 14, y: y.get(id) + 4 }, `#${id}`), s("text", { x: left + 88, y: y.get(id) + 4, "text-anchor": "end", class: "reward" }, tw.num(one.reward))));
  }
  return h("div", { class: "scroll" }, svg, group.num_left_out ? h("p", { class: "note" }, `${group.num_left_out} more attempts are not drawn.`) : null);
};
})();
