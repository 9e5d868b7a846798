// What every page uses: elements, questions to the server, addresses, numbers, the theme.
// Texts of models and envs reach the document as text nodes only; nothing here parses HTML.
(() => {
"use strict";
const tw = (window.tw = { pages: {}, charts: new Set() });

// --- elements

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
};
tw.h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
tw.s = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const h = tw.h;

tw.card = (title, note, ...children) => {
  const id = `card-${(tw.cards = (tw.cards || 0) + 1)}`;
  return h("section", { class: "card", "aria-labelledby": id },
    h("div", { class: "card-head" }, h("h2", { id }, title), note ? h("span", { class: "note" }, note) : null), ...children);
};
tw.options = (select, entries, chosen) =>
  select.replaceChildren(...entries.map(([value, label]) => h("option", { value, selected: value === chosen }, label)));

// --- questions to the server, or to the answers that an exported page holds

const stored = document.getElementById("answers");
tw.exported = stored ? JSON.parse(stored.textContent) : null;
const KEY = "turnwise-token";
tw.takeToken = () => {
  const given = new URL(location.href).searchParams.get("token");
  if (given) {
    localStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname + location.hash);
  }
};
tw.query = (values) => {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(values || {})) {
    if (value !== "" && value !== null && value !== undefined) search.set(key, value);
  }
  return search.toString();
};
tw.ask = async (question, values) => {
  if (tw.exported) return tw.askExport(question, values || {});
  const answer = await fetch(`api/${question}?${tw.query(values)}`, { headers: { "X-Turnwise-Token": localStorage.getItem(KEY) || "" } });
  return read(answer);
};
tw.order = async (order, body) => read(await fetch(`api/${order}`, {
  method: "POST", body: JSON.stringify(body),
  headers: { "X-Turnwise-Token": localStorage.getItem(KEY) || "", "Content-Type": "application/json" },
}));
const read = async (answer) => {
  let body;
  try { body = await answer.json(); } catch { body = { error: `the server answered ${answer.status}` }; }
  if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
  return body;
};
tw.askExport = (question, values) => {
  if (question === "attempts") return tw.filterExported(values);
  const keys = { curves: values.metric, run: values.run, findings: values.run, attempt: `${values.run}/${values.id}`, group: `${values.run}/${values.id}` };
  const found = (tw.exported.answers[question] || {})[keys[question] || ""];
  if (found && question === "curves") return { ...found, groups: found.groups.filter((group) => group.runs.some((name) => values.runs.split(",").includes(name))) };
  if (found) return found;
  throw new Error("This page was exported to a file and does not hold that. Open the run with turnwise view to see it.");
};

// --- addresses

tw.go = (parts, values) => {
  const path = parts.map(encodeURIComponent).join("/");
  const search = tw.query(values);
  return `#/${path}${search ? `?${search}` : ""}`;
};
tw.route = () => {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { page: parts[0] || "runs", parts: parts.slice(1), values: Object.fromEntries(new URLSearchParams(search || "")) };
};
tw.crumbs = (...entries) => {
  const items = entries.map(([label, address]) => h("li", {}, address ? h("a", { href: address }, label) : h("span", { "aria-current": "page" }, label)));
  document.getElementById("crumbs").replaceChildren(h("ol", {}, items));
  document.title = [...entries.map(([label]) => label).reverse(), "turnwise"].join(" · ");
};

// --- numbers and words

tw.num = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
};
tw.percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
tw.amount = (value, unit) => (unit === "share" ? tw.percent(value) : tw.num(value));
tw.signed = (value) => `${value > 0 ? "+" : ""}${tw.num(value)}`;
tw.duration = (seconds) => {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
};
tw.plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
tw.clock = (seconds) => new Date(1000 * seconds).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
tw.pill = (text, kind) => h("span", { class: `pill ${kind || ""}` }, text);
const STATES = { running: "live", starting: "live", finished: "good", failed: "bad", damaged: "bad", stopped: "warn", killed: "warn" };
tw.statePill = (state) => tw.pill(state, STATES[state]);
tw.verdict = (success, reason) =>
  success === null || success === undefined ? tw.pill(reason || "no verdict") : success ? tw.pill("success", "good") : tw.pill("no success", "bad");
// Where all attempts earned the same, the verdict gives the colour.
tw.rewardColor = (reward, low, high, success = null) => {
  if (high <= low) return success === null ? "var(--mid)" : success ? "var(--good)" : "var(--bad)";
  const share = Math.max(0, Math.min(1, (reward - low) / (high - low)));
  return `color-mix(in oklab, var(--good) ${Math.round(100 * share)}%, var(--bad))`;
};

// --- messages and theme

let hide;
tw.say = (text, isBad) => {
  const place = document.getElementById("toast");
  place.replaceChildren(h("div", { class: isBad ? "bad" : "" }, text));
  clearTimeout(hide);
  hide = setTimeout(() => place.replaceChildren(), isBad ? 12000 : 6000);
};
tw.guarded = (work) => async (...given) => {
  try { return await work(...given); } catch (error) { tw.say(error.message, true); }
};
const THEME = "turnwise-theme";
tw.theme = () => {
  try { return localStorage.getItem(THEME) || ""; } catch { return ""; }
};
tw.setTheme = (theme) => {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  for (const chart of tw.charts) chart.redraw(false, true);
};
tw.switchTheme = () => {
  const isDark = tw.css("color-scheme") === "dark";
  const theme = isDark ? "light" : "dark";
  try { localStorage.setItem(THEME, theme); } catch { /* a file without storage */ }
  tw.setTheme(theme);
};
tw.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
})();
