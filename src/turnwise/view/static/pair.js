// Two attempts of a group side by side, turn by turn; the turn and the token at which they part are marked.
(() => {
"use strict";
const { h } = tw;

// The first turn in which they differ, and the token there; null if one only goes on where the other ends.
const parting = (left, right) => {
  const both = Math.min(left.turns.length, right.turns.length);
  for (let turn = 0; turn < both; turn++) {
    const a = left.turns[turn], b = right.turns[turn];
    if (a.tokens && b.tokens) {
      const length = Math.min(a.tokens.ids.length, b.tokens.ids.length);
      let token = 0;
      while (token < length && a.tokens.ids[token] === b.tokens.ids[token]) token++;
      if (token < Math.max(a.tokens.ids.length, b.tokens.ids.length)) return { turn, token, where: "reply" };
    } else if (JSON.stringify(a.reply) !== JSON.stringify(b.reply)) return { turn, token: null, where: "reply" };
    if (JSON.stringify(a.observation) !== JSON.stringify(b.observation)) return { turn, token: null, where: "env" };
  }
  return left.turns.length === right.turns.length ? null : { turn: both, token: null, where: "end" };
};
const words = (at) => {
  if (!at) return "They say the same in every turn.";
  if (at.where === "env") return `They part after turn ${at.turn + 1}: the same reply, another answer of the env.`;
  if (at.where === "end") return `They say the same for ${tw.plural(at.turn, "turn")}; then only one goes on.`;
  return `They part in turn ${at.turn + 1}${at.token === null ? "" : `, at token ${at.token + 1}`}.`;
};

// What both said stands once; what each was taught by it may differ.
const sharedTurn = (left, right, turn) => {
  const block = tw.turnBlock(left.turns[turn], turn, "", left);
  const own = block.querySelector(".chip.advantage");
  if (own) own.replaceWith(...[left, right].map((attempt) => tw.advantageChip(attempt.turns[turn], `#${attempt.row.id} `)).filter(Boolean));
  return block;
};

tw.pages.pair = async (root, { parts }) => {
  const [run, first, second] = [parts[0], Number(parts[1]), Number(parts[2])];
  const [left, right] = await Promise.all([tw.ask("attempt", { run, id: first }), tw.ask("attempt", { run, id: second })]);
  tw.crumbs(["Runs", "#/"], [run, tw.go(["run", run])], [`#${first}`, tw.go(["attempt", run, first])], [`and #${second}`]);
  const at = parting(left, right), state = { view: "sampler" }, body = h("div", { class: "pair" });
  const isSameTask = left.row.task_id === right.row.task_id && left.row.step === right.row.step;
  const title = (attempt) => h("div", { class: "title" }, h("h2", {}, h("a", { href: tw.go(["attempt", run, attempt.row.id]) }, `#${attempt.row.id}`)), tw.verdict(attempt.row.is_success, attempt.row.end_reason), tw.pill(`reward ${tw.num(attempt.row.reward)}`));
  const draw = () => {
    const rows = [h("div", { class: "pair-row" }, title(left), title(right))];
    const isSameStart = JSON.stringify(left.start) === JSON.stringify(right.start);
    rows.push(isSameStart ? h("div", { class: "pair-row one" }, h("div", { class: "same-turn" }, left.start.map((message) => tw.message(message))))
      : h("div", { class: "pair-row parts" }, ...[left, right].map((attempt) => h("div", {}, attempt.start.map((message) => tw.message(message))))));
    for (let turn = 0; turn < Math.max(left.turns.length, right.turns.length); turn++) {
      const isSame = !at || turn < at.turn;
      if (at && turn === at.turn) rows.push(h("p", { class: "parting", role: "note" }, words(at)));
      rows.push(isSame ? h("div", { class: "pair-row one" }, h("div", { class: "same-turn" }, sharedTurn(left, right, turn)))
        : h("div", { class: "pair-row" }, ...[left, right].map((attempt) => (attempt.turns[turn]
            ? tw.turnBlock(attempt.turns[turn], turn, state.view || "sampler", attempt, turn === at.turn ? at.token : null, `#${attempt.row.id}`) : h("p", { class: "empty" }, `#${attempt.row.id} is over.`)))));
    }
    body.replaceChildren(...rows);
  };
  root.append(h("h1", { tabindex: -1 }, "Two attempts"), h("p", { class: "sub" }, isSameTask ? `${left.row.task_id} · step ${left.row.step}` : "attempts of different groups", ` · ${words(at)}`), tw.tokenTools(state, draw, [left, right]), body);
  draw();
  return { runs: () => [run] };
};
})();
