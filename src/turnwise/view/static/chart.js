// Charts over steps: lines, bands of intervals, stacked shares. uPlot draws; the numbers are also in the label.
(() => {
"use strict";
const { h } = tw;
const COLORS = 10;
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power)); // between two steps is nothing
tw.color = (index) => tw.css(`--series-${(index % COLORS) + 1}`);
tw.colorVar = (index) => `var(--series-${(index % COLORS) + 1})`;

// Lines may have steps of their own: all are put on the union of their steps.
const merge = (lines) => {
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const column = (line, values) => {
    const found = new Array(steps.length).fill(null);
    line.x.forEach((step, index) => { found[place.get(step)] = values[index]; });
    return found;
  };
  return { steps, column };
};

// lines: [{label, x, y, low?, high?, color (index), width?, faint?}]
tw.chart = (lines, { title, unit = "", height = 220, range = null, stacked = false, legend = true } = {}) => {
  const drawn = lines.filter((line) => line.x.length);
  const latest = drawn.slice(0, 6).map((line) => `${line.label} ${tw.amount(line.y[line.y.length - 1], unit)}`).join(", ");
  const place = h("div", { class: "plot", role: "img", "aria-label": `${title}: ${drawn.length ? `latest ${latest}` : "no values yet"}` });
  const tip = h("div", { class: "tip", "aria-hidden": "true" });
  const box = h("div", { class: "chart" }, place);
  if (!drawn.length) {
    place.append(h("p", { class: "empty" }, "No values yet."));
    return box;
  }
  if (legend) box.prepend(makeLegend(drawn));
  const { steps, column } = merge(drawn);
  const { data, series, bands } = stacked ? stackedColumns(drawn, column) : columns(drawn, column);
  const options = {
    width: 300, height, series: [{}, ...series], bands,
    scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: range ? () => range : padded } },
    axes: [axis({ size: 24, incrs: WHOLE, ...(height >= 200 ? { label: "step", labelSize: 15, labelGap: 0, labelFont: "11px Inter, sans-serif" } : {}) }), axis({ size: 52, values: (u, ticks) => ticks.map((tick) => (unit === "share" ? `${Math.round(100 * tick)} %` : tw.num(tick))) })],
    legend: { show: false }, padding: [10, 12, 0, 0],
    cursor: { y: false, points: { size: 6 }, focus: { prox: 24 }, drag: { x: true, y: false } },
    hooks: { setCursor: [(u) => showTip(u, tip, drawn, column, steps, unit)] },
  };
  whenSeen(box, () => {
    for (const old of waiting) if (!old.isConnected && old !== box) { waiting.delete(old); watcher.unobserve(old); }
    const width = place.clientWidth || 300;
    const chart = new uPlot({ ...options, width }, [steps, ...data], place);
    chart.root.append(tip);
    tw.charts.add(chart);
    new ResizeObserver(() => {
      if (!place.isConnected) { if (tw.charts.delete(chart)) chart.destroy(); return; }
      if (place.clientWidth && place.clientWidth !== chart.width) chart.setSize({ width: place.clientWidth, height });
    }).observe(place);
  });
  place.style.setProperty("min-height", `${height}px`);
  return box;
};

const padded = (u, low, high) => {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high) * 1.2 || 1];
  const pad = 0.06 * (high - low);
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
};
const axis = (more) => ({
  stroke: () => tw.css("--muted"), font: "11px Inter, sans-serif", gap: 4,
  grid: { stroke: () => tw.css("--grid"), width: 1 }, ticks: { show: false }, ...more,
});

const columns = (lines, column) => {
  const data = [], series = [], bands = [];
  for (const line of lines) {
    if (line.low) {
      for (const side of [line.high, line.low]) {
        data.push(column(line, side));
        series.push({ stroke: "transparent", spanGaps: true, points: { show: false }, width: 0 });
      }
      bands.push({ series: [data.length - 1, data.length], fill: () => translucent(tw.color(line.color), 0.16) });
    }
  }
  for (const line of lines) {
    data.push(column(line, line.y));
    series.push({
      label: line.label, spanGaps: true, width: line.width || 1.75, alpha: line.faint ? 0.35 : 1,
      stroke: () => tw.color(line.color), points: { show: line.x.length < 30 && !line.faint, size: 5, fill: () => tw.color(line.color) },
    });
  }
  return { data, series, bands };
};
const stackedColumns = (lines, column) => {
  const data = [], series = [], bands = [];
  let below = null;
  for (const line of lines) {
    const own = column(line, line.y).map((value) => value ?? 0);
    below = below ? own.map((value, index) => value + below[index]) : own;
    data.unshift(below);
  }
  [...lines].reverse().forEach((line, index) => {
    series.push({ label: line.label, width: 1, stroke: () => tw.color(line.color), fill: () => translucent(tw.color(line.color), 0.55), points: { show: false } });
    if (index) bands.push({ series: [index, index + 1] });
  });
  return { data, series, bands };
};
const translucent = (color, alpha) => {
  const found = /^#(..)(..)(..)$/.exec(color);
  return found ? `rgba(${found.slice(1).map((part) => parseInt(part, 16)).join(",")},${alpha})` : color;
};

const makeLegend = (lines) => h("ul", { class: "legend" }, lines.filter((line) => !line.faint).map((line) =>
  h("li", {}, h("i", { style: { background: tw.colorVar(line.color) } }), line.label)));

const showTip = (u, tip, lines, column, steps, unit) => {
  const at = u.cursor.idx;
  if (at === null || at === undefined || u.cursor.left < 0) { tip.classList.remove("on"); return; }
  const rows = lines.map((line) => ({ line, where: line.x.indexOf(steps[at]) })).filter(({ where }) => where >= 0).slice(0, 12);
  tip.replaceChildren(h("b", {}, `step ${steps[at]}`), ...rows.map(({ line, where }) => h("div", {},
    h("i", { style: { background: tw.colorVar(line.color) } }), h("span", {}, line.label),
    h("em", {}, tw.amount(line.y[where], unit), line.low && line.low[where] !== null ? ` [${tw.amount(line.low[where], unit)}, ${tw.amount(line.high[where], unit)}]` : ""))));
  const isRight = u.cursor.left > u.over.clientWidth / 2;
  tip.style.setProperty("left", isRight ? "auto" : `${u.cursor.left + 64}px`);
  tip.style.setProperty("right", isRight ? `${u.over.clientWidth - u.cursor.left + 24}px` : "auto");
  tip.classList.add("on");
};

// Charts that nobody sees yet cost nothing. Paper shows all of them.
const waiting = new Set();
const draw = (box) => { if (waiting.delete(box)) { watcher.unobserve(box); box.whenSeen(); } };
window.addEventListener("beforeprint", () => { for (const box of waiting) if (box.isConnected) draw(box); });
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) draw(entry.target);
  }
}, { rootMargin: "200px" });
const whenSeen = (box, work) => { box.whenSeen = work; waiting.add(box); watcher.observe(box); };

// A few points as a small line without axes.
tw.spark = (x, y, { low = null, high = null, color = 0, label = "" } = {}) => {
  const width = 120, height = 28, known = y.filter((value) => value !== null);
  const svg = tw.s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  if (known.length < 2) return svg;
  const bottom = low ?? Math.min(...known), top = high ?? Math.max(...known), span = top - bottom || 1;
  const last = x[x.length - 1] - x[0] || 1;
  const points = x.map((step, index) => `${(2 + ((width - 4) * (step - x[0])) / last).toFixed(1)},${(height - 3 - ((height - 6) * (y[index] - bottom)) / span).toFixed(1)}`);
  svg.append(tw.s("polyline", { points: points.join(" "), fill: "none", stroke: tw.colorVar(color), "stroke-width": 1.5, "stroke-linejoin": "round" }));
  return svg;
};
})();
