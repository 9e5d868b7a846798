// The tokens of a turn: text coloured by one of the numbers about each token, all of them on hover and in a table.
(() => {
"use strict";
const { h } = tw;
// name, label, what a colour means, how to get the value of token i of a turn
tw.TOKEN_VIEWS = [
  ["sampler", "sampler logprob", "darker: less likely", (t, i) => t.sampler[i]],
  ["trainer", "trainer logprob", "darker: less likely", (t, i) => (t.trainer ? t.trainer[i] : null)],
  ["gap", "trainer − sampler", "blue: the trainer gives it more, orange: less", (t, i) => (t.trainer ? t.trainer[i] - t.sampler[i] : null)],
  ["advantage", "advantage", "green: made more likely, red: less", (t, i) => (t.mask[i] ? t.advantage[i] : null)],
  ["value", "critic's value", "darker: higher", (t, i) => (t.value ? t.value[i] : null)],
  ["mask", "mask", "shaded: in the loss", (t, i) => (t.mask[i] ? 1 : 0)],
];
const mix = (color, share) => `color-mix(in srgb, var(${color}) ${Math.round(Math.max(0, Math.min(1, share)) * 62)}%, transparent)`;
const tint = (view, value, most) => {
  if (value === null || value === undefined) return "transparent";
  if (view === "sampler" || view === "trainer") return mix("--series-2", -value / 4);
  if (view === "gap") return mix(value > 0 ? "--series-1" : "--series-2", Math.abs(value) / most);
  if (view === "advantage") return mix(value > 0 ? "--good" : "--bad", Math.abs(value) / most);
  if (view === "value") return mix("--series-1", Math.abs(value) / most);
  return value ? mix("--series-1", 0.4) : "transparent";
};
tw.largest = (turns, view) => {
  const get = tw.TOKEN_VIEWS.find(([name]) => name === view)[3];
  const sizes = turns.flatMap((turn) => (turn.tokens ? turn.tokens.ids.map((_, i) => Math.abs(get(turn.tokens, i) ?? 0)) : []));
  return Math.max(view === "gap" ? 0.01 : 1e-6, ...sizes);
};

const facts = (turn, i) => {
  const t = turn.tokens;
  return [["token", `${JSON.stringify(t.texts[i])} (${t.ids[i]})`], ["sampler logprob", tw.num(t.sampler[i])],
    ["trainer logprob", t.trainer ? tw.num(t.trainer[i]) : "not trained"], ["difference", t.trainer ? tw.num(t.trainer[i] - t.sampler[i]) : "–"],
    ["advantage", t.mask[i] ? tw.num(t.advantage[i]) : "–"], ["in the loss", t.mask[i] ? "yes" : "no"],
    ["critic's value", t.value ? tw.num(t.value[i]) : "no critic"], ["policy version", turn.policy_version]];
};
const bubble = h("div", { class: "tip token-tip", role: "tooltip", id: "token-tip" });
const show = (event) => {
  const span = event.target.closest(".tok");
  if (!span || !span.facts) { bubble.classList.remove("on"); return; }
  bubble.replaceChildren(h("dl", {}, span.facts().map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  document.body.append(bubble);
  const at = span.getBoundingClientRect();
  bubble.classList.add("on");
  const top = at.bottom + bubble.offsetHeight + 12 > innerHeight ? at.top - bubble.offsetHeight - 6 : at.bottom + 6;
  bubble.style.setProperty("left", `${Math.max(8, Math.min(at.left, innerWidth - bubble.offsetWidth - 12))}px`);
  bubble.style.setProperty("top", `${top}px`);
};
document.addEventListener("mouseover", show);
document.addEventListener("focusin", show);

// marks: index of the token at which two attempts part, or null
tw.tokenText = (turn, view, most, partsAt = null) => {
  const get = tw.TOKEN_VIEWS.find(([name]) => name === view)[3], t = turn.tokens;
  return h("div", { class: "tokens", role: "group", "aria-label": `tokens, coloured by ${view}` }, t.ids.map((_, i) => {
    const text = t.texts[i];
    const span = h("span", { class: `tok${t.mask[i] ? "" : " off"}${partsAt === i ? " parts" : ""}${partsAt !== null && i < partsAt ? " same" : ""}`, tabindex: i === 0 ? 0 : -1,
      style: { background: tint(view, get(t, i), most) } }, text === "" ? "·" : text.replace(/\n/g, "↵\n"));
    span.facts = () => facts(turn, i);
    return span;
  }));
};
// Arrow keys walk from token to token.
document.addEventListener("keydown", (event) => {
  if (!event.target.classList || !event.target.classList.contains("tok")) return;
  const next = event.key === "ArrowRight" ? event.target.nextElementSibling : event.key === "ArrowLeft" ? event.target.previousElementSibling : null;
  if (next) { event.preventDefault(); next.focus(); }
});
tw.tokenTable = (turn) => {
  const names = ["token", "id", "sampler", "trainer", "difference", "advantage", "loss", "value"];
  const t = turn.tokens;
  return h("div", { class: "scroll token-table" }, h("table", { class: "rows" }, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col", class: name === "token" ? null : "n" }, name)))),
    h("tbody", {}, t.ids.map((id, i) => h("tr", {}, h("td", {}, h("code", {}, JSON.stringify(t.texts[i]).slice(1, -1))), ...[id, tw.num(t.sampler[i], 4), t.trainer ? tw.num(t.trainer[i], 4) : "–",
      t.trainer ? tw.num(t.trainer[i] - t.sampler[i]) : "–", t.mask[i] ? tw.num(t.advantage[i]) : "–", t.mask[i] ? "yes" : "no", t.value ? tw.num(t.value[i]) : "–"].map((value) => h("td", { class: "n" }, value)))))));
};
})();
