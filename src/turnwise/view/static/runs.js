// Runs side by side: curves with intervals, seeds grouped, how each stands, and how their configs differ.
(() => {
"use strict";
const { h } = tw;
const METRICS = [["eval/success", "held-out success"], ["eval/reward", "held-out reward"], ["rollout/reward_mean", "reward in training"], ["rollout/success_mean", "success in training"]];

tw.pages.runs = async (root, { values }) => {
  tw.crumbs(["Runs"]);
  const state = { world: values.world || "", metric: values.metric || "eval/success", grouped: values.grouped !== "no", hidden: new Set() };
  const plot = h("div"), table = h("div", { class: "scroll" }), differences = h("div", { class: "scroll" }), where = h("p", { class: "sub" });
  const metric = h("select", { id: "metric", onchange: tw.guarded(async () => { state.metric = metric.value; await curves(); }) });
  const grouped = h("input", { type: "checkbox", id: "grouped", checked: state.grouped, onchange: tw.guarded(async () => { state.grouped = grouped.checked; await curves(); }) });
  const world = h("select", { id: "world", onchange: tw.guarded(async () => { state.world = world.value; await refresh(); await differ(); }) });
  const worldLabel = h("label", { for: "world" }, "world ", world);
  root.append(h("h1", { tabindex: -1 }, "Runs"), where,
    tw.card("Curves", null, h("div", { class: "tools" }, worldLabel, h("label", { for: "metric" }, "metric "), metric, h("label", { class: "check" }, grouped, " group seeds")), plot),
    tw.card("All runs", null, table),
    tw.card("Config differences", null, differences));
  let runs = [];

  const curves = async () => {
    const shown = runs.filter((run) => run.state !== "damaged" && !state.hidden.has(run.name)).map((run) => run.name);
    const found = await tw.ask("curves", { metric: state.metric, runs: shown.join(",") });
    const known = METRICS.filter(([name]) => name.startsWith("eval/") || found.metrics.includes(name));
    const others = found.metrics.filter((name) => !METRICS.some(([known]) => known === name)).map((name) => [name, name]);
    tw.options(metric, [...known, ...others], state.metric);
    const unit = state.metric === "eval/success" || /success_mean|_share$|_fraction$/.test(state.metric) ? "share" : "";
    const colors = groupColors(runs);
    const lines = [];
    for (const group of found.groups) {
      const color = colors.get(group.group);
      if (!state.grouped || group.runs.length === 1) {
        for (const name of group.runs) lines.push({ label: name, color: state.grouped ? color : runs.findIndex((run) => run.name === name), ...found.curves[name] });
      } else {
        for (const name of group.runs) lines.push({ label: name, color, faint: true, width: 1, x: found.curves[name].x, y: found.curves[name].y });
        lines.push({ ...group, label: `${group.group} (${group.runs.length} seeds)`, color, width: 2.25 });
      }
    }
    const range = state.metric === "eval/success" ? [0, 1] : null;
    const note = state.grouped && found.groups.some((group) => group.runs.length > 1) ? "Bands: 95 % interval between seeds; of a single run, over its held-out tasks. Thin lines: single seeds." : "Bands: 95 % interval over held-out tasks.";
    plot.replaceChildren(tw.chart(lines, { title: state.metric, unit, height: 300, range }), h("p", { class: "note" }, state.metric.startsWith("eval/") || state.grouped ? note : ""));
  };

  const differ = async () => {
    const names = runs.filter((run) => run.state !== "damaged").map((run) => run.name);
    if (names.length < 2) { differences.replaceChildren(h("p", { class: "empty" }, "One run: nothing to compare with.")); return; }
    const found = await tw.ask("differences", { runs: names.join(",") });
    const table = (rows) => h("table", { class: "config" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "option"), found.groups.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, row.option)), row.values.map((value) => h("td", {}, h("code", {}, value === "" ? "–" : value)))))));
    differences.replaceChildren(found.rows.length ? table(found.rows) : h("p", { class: "empty" }, "All options that every run has are the same."),
      found.partial.length ? h("details", { class: "more" }, h("summary", {}, `${tw.plural(found.partial.length, "option")} that only some runs have`), table(found.partial)) : "",
      h("p", { class: "note" }, `${tw.plural(found.num_same, "other option")} are the same.`));
  };

  const refresh = async () => {
    const found = await tw.ask("runs");
    const worlds = [...new Set(found.runs.map((run) => run.world).filter(Boolean))];
    worldLabel.hidden = worlds.length < 2;
    tw.options(world, [["", "any"], ...worlds.map((name) => [name, name])], state.world);
    runs = found.runs.filter((run) => !state.world || run.world === state.world);
    const live = runs.filter((run) => run.is_alive).length;
    where.replaceChildren(`${tw.plural(found.runs.length, "run")} below `, h("code", {}, found.place), live ? `, ${live} training now` : "",
      " · ", h("a", { href: tw.go(["attempts"]) }, "attempts of all runs"));
    table.replaceChildren(runTable(runs, state, tw.guarded(curves)));
    await curves();
  };
  await refresh();
  await differ();
  return { refresh, runs: () => runs.map((run) => run.name) };
};

const groupColors = (runs) => {
  const names = [...new Set(runs.filter((run) => run.state !== "damaged").map((run) => run.group))];
  return new Map(names.map((name, index) => [name, index]));
};

const runTable = (runs, state, changed) => {
  const colors = groupColors(runs);
  const heads = ["", "run", "state", "world", "model", "method", "seed", "step", "held-out success", "", "reward"];
  return h("table", { class: "runs rows" }, h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, runs.map((run) => runRow(run, colors.get(run.group), state, changed))));
};
const runRow = (run, color, state, changed) => {
  const link = h("a", { href: tw.go(["run", run.name]), class: "row-link" }, run.name);
  if (run.state === "damaged") {
    return h("tr", { class: "damaged" }, h("td"), h("td", {}, link), h("td", {}, tw.statePill("damaged")), h("td", { colspan: 8, class: "error" }, run.error));
  }
  const box = h("input", { type: "checkbox", checked: !state.hidden.has(run.name), "aria-label": `draw ${run.name}`, style: { "accent-color": tw.colorVar(color) },
    onchange: () => { state.hidden[box.checked ? "delete" : "add"](run.name); changed(); } });
  const rows = [...new Map(run.evaluations.filter((row) => row.success !== null).map((row) => [row.step, row])).values()], last = rows[rows.length - 1];
  return h("tr", {}, h("td", {}, box), h("td", {}, link), h("td", {}, tw.statePill(run.state), run.alarms && run.alarms.length ? tw.pill("alarm", "warn") : null),
    h("td", {}, run.world), h("td", {}, run.model), h("td", {}, run.method), h("td", { class: "n" }, run.seed),
    h("td", { class: "n" }, tw.progress(run)),
    h("td", { class: "n" }, last ? [h("b", {}, tw.percent(last.success)), h("small", {}, ` ${tw.percent(last.success_low)} – ${tw.percent(last.success_high)}`)] : "–"),
    h("td", {}, tw.spark(rows.map((row) => row.step), rows.map((row) => row.success), { low: 0, high: 1, color, label: `held-out success of ${run.name}` })),
    h("td", { class: "n" }, tw.num(run.reward)));
};
tw.progress = (run) => h("span", { class: "progress", title: run.left_s ? `about ${tw.duration(run.left_s)} left` : null },
  h("span", {}, `${run.step} / ${run.num_steps}`),
  h("progress", { max: Math.max(1, run.num_steps), value: run.step, "aria-label": `${run.step} of ${run.num_steps} steps` }));
})();
