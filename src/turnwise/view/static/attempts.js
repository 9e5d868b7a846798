// Attempts and groups of one run or of all: filtered, searched, one page at a time.
(() => {
"use strict";
const { h } = tw;
const SIZE = 50;
const SEARCHING_MS = 500;
const ORDERS = [["newest", "newest first"], ["oldest", "oldest first"], ["best", "highest reward"], ["worst", "lowest reward"], ["longest", "most tokens"], ["turns", "most turns"]];
const FIELDS = ["run", "world", "view", "phase", "outcome", "stop_reason", "success", "step_from", "step_to", "reward_from", "reward_to", "task", "text", "order", "first"];
const END_REASONS = ["terminated", "truncated", "max_turns", "max_tokens", "time_limit", "unparsable", "failed"];

tw.pages.attempts = async (root, { values }) => {
  // The list of a named run does not wait for the list of runs.
  const early = values.run ? tw.ask(values.view === "groups" ? "groups" : "attempts", { ...values, size: SIZE, view: "" }) : null;
  if (early && early.catch) early.catch(() => {});
  const { runs } = await tw.ask("runs");
  const readable = runs.filter((run) => run.state !== "damaged");
  const run = values.run || (readable.length === 1 ? readable[0].name : "");
  tw.crumbs(...[["Runs", "#/"], run ? [run, tw.go(["run", run])] : null, ["Attempts"]].filter(Boolean));
  const chosen = { ...values, run };
  const change = (more) => { location.hash = tw.go(["attempts"], Object.fromEntries(FIELDS.map((name) => [name, { ...chosen, first: "", ...more }[name]]))); };
  const isGroups = chosen.view === "groups";
  const list = h("div", { class: "scroll" }), count = h("p", { class: "sub", role: "status" }), pager = h("nav", { class: "pager", "aria-label": "Pages" });
  const form = filterForm(chosen, readable, change, isGroups);
  root.append(h("h1", { tabindex: -1 }, isGroups ? "Groups" : "Attempts"), form.element, count, h("section", { class: "card", "aria-label": "Results" }, list), pager);
  let pending = false;

  const refresh = async (answer) => {
    const asked = { ...chosen, size: SIZE, view: "" };
    const found = await (answer || tw.ask(isGroups ? "groups" : "attempts", asked));
    const first = found.first + 1, last = found.first + (found.rows || found.groups).length;
    pending = found.num_searched !== null && found.num_searched !== undefined && found.num_searched < found.num_attempts;
    count.replaceChildren(found.total ? `${tw.plural(found.total, isGroups ? "group" : "attempt")}, ${first.toLocaleString("en")} to ${last.toLocaleString("en")} shown` : "Nothing matches.",
      pending ? ` · searched ${found.num_searched.toLocaleString("en")} of ${found.num_attempts.toLocaleString("en")} attempts so far` : "",
      found.note ? ` · ${found.note}` : "");
    list.replaceChildren(isGroups ? groupList(found.groups, !run) : attemptTable(found.rows, !run));
    pager.replaceChildren(...pages(found, change));
    if (pending) setTimeout(() => { if (list.isConnected) tw.guarded(refresh)(); }, SEARCHING_MS);
  };
  await refresh(early);
  const facets = async () => {
    if (tw.exported) return;
    const counts = await tw.ask("facets", { run, world: chosen.world });
    if (counts.is_complete) form.count(counts);
  };
  facets().catch(() => {});
  return { refresh: async () => { await refresh(); await facets(); }, runs: () => (run ? [run] : readable.map((one) => one.name)) };
};

const filterForm = (chosen, runs, change, isGroups) => {
  const selects = {};
  const select = (name, label, entries) => {
    selects[name] = h("select", { id: `f-${name}`, onchange: (event) => change({ ...(name === "run" ? { world: "" } : {}), [name]: event.target.value }) });
    tw.options(selects[name], [["", "any"], ...entries], chosen[name] || "");
    return h("label", { for: `f-${name}` }, h("span", {}, label), selects[name]);
  };
  const field = (name, label, size) => h("label", { for: `f-${name}` }, h("span", {}, label),
    h("input", { id: `f-${name}`, size, value: chosen[name] || "", placeholder: /_(from|to)$/.test(name) ? label : null, inputmode: /step|reward/.test(name) ? "decimal" : null, onchange: (event) => change({ [name]: event.target.value }) }));
  const worlds = [...new Set(runs.filter((run) => !chosen.run || run.name === chosen.run).flatMap((run) => run.worlds))];
  const search = h("input", { type: "search", id: "f-text", value: chosen.text || "", placeholder: "words in the dialogue", onchange: (event) => change({ text: event.target.value }) });
  const element = h("form", { class: "filters", role: "search", "aria-label": "Filter attempts", onsubmit: (event) => { event.preventDefault(); change({ text: search.value }); } },
    h("label", { for: "f-text", class: "wide" }, h("span", {}, "search"), search),
    runs.length > 1 ? select("run", "run", runs.map((run) => [run.name, run.name])) : null,
    worlds.length > 1 ? select("world", "world", worlds.map((world) => [world, world])) : null,
    select("phase", "phase", [["train", "train"], ["eval", "eval"]]),
    select("outcome", "outcome", [["trained", "trained"], ["evaluated", "evaluated"], ["failed", "failed"]]),
    select("stop_reason", "end reason", END_REASONS.map((reason) => [reason, reason.replace("_", " ")])),
    select("success", "success", [["yes", "yes"], ["no", "no"], ["none", "no verdict"]]),
    h("fieldset", {}, h("legend", {}, "step"), field("step_from", "from", 5), field("step_to", "to", 5)),
    h("fieldset", {}, h("legend", {}, "reward"), field("reward_from", "from", 5), field("reward_to", "to", 5)),
    field("task", "task", 12),
    isGroups ? null : select("order", "order", ORDERS),
    h("div", { class: "segmented", role: "group", "aria-label": "Show" },
      h("button", { type: "button", "aria-pressed": String(!isGroups), onclick: () => change({ view: "" }) }, "attempts"),
      h("button", { type: "button", "aria-pressed": String(isGroups), onclick: () => change({ view: "groups" }), disabled: Boolean(tw.exported) }, "groups")),
    h("button", { type: "button", class: "quiet", onclick: () => { location.hash = tw.go(["attempts"], { run: chosen.run, view: chosen.view }); } }, "Clear"));
  if (selects.order) selects.order.querySelector("option[value='']").remove();
  const count = (counts) => {
    for (const name of ["phase", "outcome", "stop_reason"]) {
      const entries = Object.entries(counts[name]).map(([value, number]) => [value, `${value.replace(/_/g, " ")} (${number.toLocaleString("en")})`]);
      if (document.activeElement !== selects[name]) tw.options(selects[name], [["", "any"], ...entries], chosen[name] || "");
    }
  };
  return { element, count };
};

const attemptTable = (rows, withRun) => {
  if (!rows.length) return h("p", { class: "empty" }, "No attempt matches these filters.");
  const heads = ["attempt", withRun ? "run" : null, "step", "phase", "task", "verdict", "reward", "end", "turns", "tokens", "last reply"].filter(Boolean);
  const low = Math.min(...rows.map((row) => row.reward)), high = Math.max(...rows.map((row) => row.reward));
  return h("table", { class: "rows attempts" }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: /^(step|reward|turns|tokens)$/.test(head) ? "n" : null }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {},
      h("td", {}, h("a", { class: "row-link", href: tw.go(["attempt", row.run, row.id]), "aria-label": `attempt ${row.id}` }, `#${row.id}`)),
      withRun ? h("td", {}, row.run) : null, h("td", { class: "n" }, row.step), h("td", {}, row.phase), h("td", { class: "clip", title: row.task_id }, row.task_id),
      h("td", {}, tw.verdict(row.is_success === null ? null : Boolean(row.is_success)), row.outcome !== "trained" && row.outcome !== "evaluated" ? tw.pill(row.outcome) : null),
      h("td", { class: "n" }, h("i", { class: "dot", style: { background: tw.rewardColor(row.reward, low, high, row.is_success) } }), tw.num(row.reward)),
      h("td", {}, row.stop_reason.replace("_", " ")), h("td", { class: "n" }, row.num_turns), h("td", { class: "n" }, row.num_sampled_tokens),
      h("td", { class: "preview" }, row.preview)))));
};

const groupList = (groups, withRun) => {
  if (!groups.length) return h("p", { class: "empty" }, "No group matches these filters.");
  return h("table", { class: "rows" }, h("thead", {}, h("tr", {}, ["task", withRun ? "run" : null, "step", "phase", "mean", "attempts, by reward"].filter(Boolean).map((head) => h("th", { scope: "col", class: /^(step|mean)$/.test(head) ? "n" : null }, head)))),
    h("tbody", {}, groups.map((group) => {
      const rewards = group.attempts.map((one) => one.reward), low = Math.min(...rewards), high = Math.max(...rewards);
      const mean = rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
      const sorted = [...group.attempts].sort((a, b) => b.reward - a.reward);
      return h("tr", {}, h("td", {}, h("a", { class: "row-link", href: tw.go(["attempt", group.run, sorted[0].id]) }, group.task_id)), withRun ? h("td", {}, group.run) : null,
        h("td", { class: "n" }, group.step), h("td", {}, group.phase), h("td", { class: "n" }, tw.num(mean)),
        h("td", {}, tw.strip(group.run, sorted, null, low, high), high === low && sorted.length > 1 ? h("small", {}, ` all ${sorted.every((one) => one.is_success) ? "succeed" : sorted.some((one) => one.is_success) ? "the same" : "fail"}: no difference to learn from`) : null));
    })));
};

// The attempts of a group as small squares, coloured by reward.
tw.strip = (run, attempts, current, low, high) => h("span", { class: "strip", role: "list", "aria-label": "Attempts of the group" }, attempts.map((one) =>
  h("span", { role: "listitem" }, h("a", { href: tw.go(["attempt", run, one.id]), class: one.id === current ? "on" : null, "aria-current": one.id === current ? "true" : null,
    "aria-label": `attempt ${one.id}, reward ${tw.num(one.reward)}`, title: `#${one.id}, reward ${tw.num(one.reward)}, ${one.stop_reason}`, style: { background: one.outcome === "failed" ? "var(--grid)" : tw.rewardColor(one.reward, low, high, one.is_success) } }))));

const pages = (found, change) => {
  const last = Math.max(0, Math.ceil(found.total / found.size) - 1), at = Math.floor(found.first / found.size);
  if (last === 0) return [];
  const to = (page, label, name) => h("button", { type: "button", disabled: page < 0 || page > last || page === at, "aria-label": name, onclick: () => change({ first: page * found.size || "" }) }, label);
  return [to(0, "«", "First page"), to(at - 1, "‹ Previous", "Previous page"), h("span", {}, `page ${(at + 1).toLocaleString("en")} of ${(last + 1).toLocaleString("en")}`), to(at + 1, "Next ›", "Next page"), to(last, "»", "Last page")];
};

// An exported page holds some attempts; it filters them here, as the server would.
tw.filterExported = (values) => {
  const words = (values.text || "").toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
  const isBetween = (value, from, to) => (from === undefined || from === "" || value >= Number(from)) && (to === undefined || to === "" || value <= Number(to));
  const rows = tw.exported.attempts.filter((row) => (!values.run || row.run === values.run) && (!values.world || row.world === values.world)
    && ["phase", "outcome", "stop_reason"].every((name) => !values[name] || row[name] === values[name])
    && (!values.success || { yes: 1, no: 0, none: null }[values.success] === row.is_success)
    && isBetween(row.step, values.step_from, values.step_to) && isBetween(row.reward, values.reward_from, values.reward_to)
    && (!values.task || row.task_id.includes(values.task)) && words.every((word) => row.text.includes(word)));
  const keys = { newest: (row) => -row.time, oldest: (row) => row.time, best: (row) => -row.reward, worst: (row) => row.reward, longest: (row) => -row.num_sampled_tokens, turns: (row) => -row.num_turns };
  const key = keys[values.order || "newest"], first = Number(values.first || 0);
  rows.sort((a, b) => key(a) - key(b));
  return { rows: rows.slice(first, first + values.size), total: rows.length, first, size: values.size, num_searched: null, note: tw.exported.note };
};
})();
