// Starts the page, follows addresses, looks for news while runs train, and reads the keyboard.
(() => {
"use strict";
const { h } = tw;
const LOOK_MS = 1500;
const KEYS = [["/", "search"], ["j  k", "next, previous row"], ["Enter", "open the row"], ["[  ]", "previous, next attempt of the group"], ["c", "compare with the next attempt of the group"], ["u", "up one page"], ["t", "dark or light"], ["?", "this list"]];
let current = null, turn = 0;

const open = async () => {
  const mine = ++turn, root = h("div", { class: "page" }), main = document.getElementById("main");
  const route = tw.route();
  const page = tw.pages[route.page] || tw.pages.runs;
  current = null;
  for (const chart of tw.charts) chart.destroy();
  tw.charts.clear();
  const late = setTimeout(() => { if (mine === turn) main.replaceChildren(h("p", { class: "empty" }, "Reading …")); }, 250);
  try {
    const opened = await page(root, route);
    if (mine !== turn) return;
    current = opened || {};
  } catch (error) {
    if (mine !== turn) return;
    root.replaceChildren(h("h1", { tabindex: -1 }, "This cannot be shown"), h("p", { class: "error" }, error.message), h("p", {}, h("a", { href: "#/" }, "All runs")));
  } finally { clearTimeout(late); }
  main.replaceChildren(root);
  document.documentElement.dataset.ready = location.hash || "#/";
  window.scrollTo(0, 0);
  const title = root.querySelector("h1");
  if (title && mine > 1) title.focus({ preventScroll: true });
};

let known = null, isBusy = false;
const lookForChanges = async () => {
  if (tw.exported || document.hidden || isBusy) return;
  isBusy = true;
  const live = document.getElementById("live");
  try {
    const { revisions } = await tw.ask("revisions");
    const isTraining = Object.values(revisions).some((text) => text.endsWith("/live"));
    live.className = `live ${isTraining ? "on" : ""}`;
    live.textContent = isTraining ? "live" : "";
    if (known && current && current.refresh) {
      const mine = turn, names = current.runs ? current.runs() : Object.keys(revisions);
      const isNew = names.some((name) => known[name] !== revisions[name]) || (current.isFolder && Object.keys(known).length !== Object.keys(revisions).length);
      if (isNew && mine === turn) await current.refresh();
    }
    known = revisions;
  } catch (error) {
    live.className = "live off";
    live.textContent = "not connected";
  } finally { isBusy = false; }
};

// --- keyboard

const rows = () => [...document.querySelectorAll("main .row-link")];
const move = (by) => {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
};
const click = (name) => { const found = document.querySelector(`[data-key="${name}"]`); if (found) found.click(); };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const doers = {
    "/": () => { const box = document.querySelector("input[type=search]"); if (box) box.focus(); },
    j: () => move(1), k: () => move(-1), "[": () => click("previous"), "]": () => click("next"), c: () => click("compare"),
    u: () => { const up = document.querySelector("#crumbs li:nth-last-child(2) a"); if (up) up.click(); },
    t: tw.switchTheme, "?": showKeys,
  };
  if (!doers[event.key]) return;
  event.preventDefault();
  doers[event.key]();
});
const showKeys = () => {
  const dialog = document.getElementById("keys");
  dialog.replaceChildren(h("h2", { id: "keys-title" }, "Keys"), h("dl", {}, KEYS.map(([key, does]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)])),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.showModal();
};

tw.takeToken();
tw.setTheme(tw.theme());
document.getElementById("theme").addEventListener("click", tw.switchTheme);
document.getElementById("help").addEventListener("click", showKeys);
window.addEventListener("hashchange", open);
open().then(lookForChanges);
setInterval(lookForChanges, LOOK_MS);
})();
