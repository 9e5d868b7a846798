// One run: what it is doing, what was found, where its time goes, and every metric by area.
(() => {
"use strict";
const { h } = tw;
const DOCTOR_MS = 15000;
const AREAS = { rollout: "Attempts", method: "Method", train: "Training", time: "Time", pool: "Pool", eval: "Held-out", warmup: "Warm-up", critic: "Critic", opponent: "Opponents", drift: "Drift", fleet: "Servers", behaviour: "Behaviour" };

tw.pages.run = async (root, { parts }) => {
  const name = parts[0];
  tw.crumbs(["Runs", "#/"], [name]);
  const head = h("div"), tiles = h("div", { class: "tiles" }), found = h("div", {}, h("p", { class: "finding" }, h("small", {}, "Asking the doctor …"))), charts = h("div", { class: "grid" });
  const search = h("input", { type: "search", id: "metric-search", placeholder: "name or meaning", "aria-label": "Search metrics", oninput: () => drawMetrics() });
  const metrics = h("div"), papers = h("div");
  root.append(head, tiles, found, charts,
    tw.card("All metrics", null, h("div", { class: "tools" }, h("label", { for: "metric-search" }, "find "), search), metrics), papers);
  let run = null;

  const drawMetrics = () => {
    const wanted = search.value.trim().toLowerCase();
    const shown = run.metrics.filter((one) => !wanted || `${one.name} ${one.meaning}`.toLowerCase().includes(wanted));
    const blocks = run.areas.filter((area) => shown.some((one) => one.name.startsWith(`${area}/`))).map((area) => {
      const own = shown.filter((one) => one.name.startsWith(`${area}/`));
      const wasOpen = metrics.querySelector(`details[data-area="${area}"]`)?.open;
      return h("details", { "data-area": area, open: wanted || wasOpen }, h("summary", {}, AREAS[area] || area, h("small", {}, ` ${own.length}`)),
        h("div", { class: "small-charts" }, own.map(smallChart)));
    });
    metrics.replaceChildren(...(blocks.length ? blocks : [h("p", { class: "empty" }, wanted ? "No metric has this in its name or meaning." : "No metrics yet.")]));
  };

  // The doctor reads attempts, which takes a moment: not before the page is there, and not at every step of a live run.
  let asked = 0;
  const lookForFindings = tw.guarded(async () => {
    if (Date.now() - asked < (run.summary.is_alive ? DOCTOR_MS : 0)) return;
    asked = Date.now();
    found.replaceChildren(findings((await tw.ask("findings", { run: name })).findings));
  });

  const refresh = async () => {
    run = await tw.ask("run", { run: name });
    const summary = run.summary;
    if (head.contains(document.activeElement) && document.activeElement.tagName === "INPUT") head.querySelector(".progress").replaceWith(tw.progress(summary));
    else head.replaceChildren(heading(name, summary), summary.state === "damaged" ? h("p", { class: "error" }, summary.error, " Other runs are not touched by this.") : toolbar(name, run));
    if (summary.state === "damaged") return;
    tiles.replaceChildren(...makeTiles(run));
    lookForFindings();
    charts.replaceChildren(...mainCharts(run));
    drawMetrics();
    const opened = new Set([...papers.querySelectorAll("details[open]")].map((one) => one.dataset.paper));
    papers.replaceChildren(...makePapers(run, opened));
  };
  await refresh();
  return { refresh, runs: () => [name] };
};

const metric = (run, name) => run.metrics.find((one) => one.name === name) || { x: [], y: [], unit: "", meaning: "" };
const lastOf = (run, name) => { const { y } = metric(run, name); return y.length ? y[y.length - 1] : null; };
const line = (run, name, label, color, more) => ({ label, color, ...metric(run, name), ...more });

const heading = (name, summary) => h("div", { class: "title" }, h("h1", { tabindex: -1 }, name), tw.statePill(summary.state),
  summary.phase && summary.phase !== "training" ? tw.pill(summary.phase) : null);

const toolbar = (name, run) => {
  const { summary } = run;
  const facts = [(summary.worlds || []).length > 1 ? `mix of ${summary.worlds.join(", ")}` : summary.world, summary.model, summary.method, summary.seed === null ? null : `seed ${summary.seed}`].filter(Boolean).join(" · ");
  return h("div", { class: "run-head" },
    h("p", { class: "sub" }, facts, " · ", h("a", { href: tw.go(["attempts"], { run: name }) }, "attempts"), " · ", h("a", { href: tw.go(["attempts"], { run: name, view: "groups" }) }, "groups")),
    tw.progress(summary), summary.is_alive && summary.left_s ? h("span", { class: "note" }, `about ${tw.duration(summary.left_s)} left`) : null,
    h("span", { class: "grow" }), tw.exported ? null : buttons(name, run), summary.is_alive ? liveLine(summary) : null);
};

const liveLine = (summary) => h("p", { class: "note live-line" }, [
  summary.silent_s > 5 ? `no sign of life for ${tw.duration(summary.silent_s)}` : null, summary.reason ? `waits for ${summary.reason}` : null,
  ...Object.entries(summary.pool || {}).map(([state, count]) => `${count} ${state}`), summary.memory_mb ? `${Math.round(summary.memory_mb).toLocaleString("en")} MB` : null,
].filter(Boolean).join(" · "));

const buttons = (name, run) => {
  const give = (order, body) => tw.guarded(async () => tw.say((await tw.order(order, { run: name, ...body })).said))();
  if (!run.summary.is_alive) {
    const more = h("input", { "aria-label": "Changed options of the resumed run", size: 16, placeholder: `train.steps=${2 * run.summary.num_steps}` });
    const button = h("button", { type: "submit", title: "What `turnwise train --resume` does, in a process of its own" }, "Resume");
    return h("form", { class: "buttons", onsubmit: (event) => {
      event.preventDefault();
      button.disabled = true;
      give("resume", { overrides: more.value.split(/\s+/).filter(Boolean) }).finally(() => { button.disabled = false; });
    } }, more, button);
  }
  const select = h("select", { "aria-label": "Setting" }, Object.keys(run.settings).map((one) => h("option", { value: one }, one)));
  const value = h("input", { "aria-label": "New value", size: 8, required: true, placeholder: String(Object.values(run.settings)[0]) });
  select.addEventListener("change", () => value.setAttribute("placeholder", String(run.settings[select.value])));
  const steer = h("form", { class: "steer", onsubmit: (event) => { event.preventDefault(); give("steer", { setting: `${select.value}=${value.value}` }); } },
    select, value, h("button", { type: "submit", title: "What `turnwise steer` does" }, "Steer"));
  return h("div", { class: "buttons" }, steer,
    h("button", { type: "button", onclick: () => give("stop", {}), title: "What `turnwise stop` does: after this step, saved" }, "Stop"),
    h("button", { type: "button", class: "danger", onclick: () => { if (confirm("Stop now? The run falls back to its last checkpoint.")) give("stop", { now: true }); }, title: "What `turnwise stop --now` does" }, "Stop now"));
};

const tile = (label, value, note, title) => h("div", { class: "tile", title }, h("span", {}, label), h("b", {}, value), h("small", {}, note || "\u00a0"));
const makeTiles = (run) => {
  const rows = run.evaluations.filter((row) => row.success !== null), last = rows[rows.length - 1];
  const first = rows.find((row) => row.label === "warm-up") || rows[0];
  const meaning = (name) => metric(run, name).meaning;
  return [
    tile("held-out success", last ? tw.percent(last.success) : "–", last ? `${tw.percent(last.success_low)} – ${tw.percent(last.success_high)}, step ${last.step}` : "not evaluated", meaning("eval/success")),
    tile("by training", last && first !== last ? `${last.success >= first.success ? "+" : ""}${(100 * (last.success - first.success)).toFixed(1)} pts` : "–", first ? `from ${tw.percent(first.success)} (${first.label})` : "", "Held-out success now minus that before the first step"),
    tile("reward in training", tw.num(lastOf(run, "rollout/reward_mean")), `success ${tw.percent(lastOf(run, "rollout/success_mean"))}`, meaning("rollout/reward_mean")),
    tile("entropy", tw.num(lastOf(run, "rollout/entropy_estimate")), "nats per token", meaning("rollout/entropy_estimate")),
    tile("time per step", tw.duration(lastOf(run, "time/step_s")), `${tw.num(lastOf(run, "rollout/sampled_tokens_per_s"))} tokens/s`, meaning("time/step_s")),
    tile("sampler and trainer", tw.num(lastOf(run, "train/kl_sampler_trainer_k2")), "KL, nats per token (k2)", meaning("train/kl_sampler_trainer_k2")),
  ];
};

const findings = (all) => {
  if (!all.length) return h("p", { class: "finding good" }, h("b", {}, "Nothing to report."), h("span", {}, " The doctor finds no reason why this run should not learn."));
  return h("div", { role: "list", "aria-label": "Findings" }, all.map((one) => h("div", { class: `finding ${one.level}`, role: "listitem" },
    h("b", {}, one.title), h("p", {}, one.text), one.fixes.length ? h("ul", { class: "plain" }, one.fixes.map((fix) => h("li", {}, fix))) : null,
    one.evidence ? h("details", { class: "more" }, h("summary", {}, "example"), h("pre", {}, one.evidence)) : null)));
};

const mainCharts = (run) => {
  const held = run.evaluations.filter((row) => row.success !== null);
  const latest = [...new Map(held.map((row) => [row.step, row])).values()];
  const column = (key) => latest.map((row) => row[key]);
  const found = [tw.card("Success", "band: 95 % interval", tw.chart([
    { label: "held-out", color: 0, width: 2.25, x: column("step"), y: column("success"), low: column("success_low"), high: column("success_high") },
    line(run, "rollout/success_mean", "in training", 1, { width: 1.25 })], { title: "Success", unit: "share", range: [0, 1] }))];
  const parts = run.metrics.filter((one) => /^rollout\/reward_\w+_mean$/.test(one.name) && one.y.some((value) => value !== 0));
  found.push(tw.card("Reward", "after shaping, by channel", tw.chart([line(run, "rollout/reward_mean", "all", 0, { width: 2 }),
    ...(parts.length > 1 ? parts.map((one, index) => ({ label: one.name.slice(15, -5), color: index + 1, ...one })) : [])], { title: "Reward in training" })));
  const shares = [["time/sampling_share", "sampler"], ["time/env_share", "envs and tools"], ["time/training_share", "training"]].map(([name, label], index) => line(run, name, label, index));
  found.push(tw.card("Where the time goes", "share of a step", tw.chart(shares.filter((one) => one.x.length), { title: "Time split", unit: "share", range: [0, 1], stacked: true })));
  const turns = run.metrics.filter((one) => /^rollout\/entropy_turn_/.test(one.name));
  found.push(tw.card("Entropy", turns.length ? "by turn, nats per token" : "nats per token", tw.chart(turns.length > 1 ? turns.map((one, index) => ({ label: `turn ${one.name.split("_").pop()}`, color: index, ...one })) : [line(run, "rollout/entropy_estimate", "all replies", 0)], { title: "Entropy" })));
  const parts5 = run.metrics.filter((one) => /^behaviour\/entropy_fifth_/.test(one.name));
  if (parts5.length > 1) found.push(tw.card("Entropy over an attempt", "by fifth of the attempt, nats per token", tw.chart(parts5.map((one, index) => ({ label: `fifth ${one.name.slice(-1)}`, color: index, ...one })), { title: "Entropy over an attempt" })));
  const acts = run.metrics.filter((one) => /^behaviour\/(sibling_diversity|repeat_share|unparsable_share|tool_error_share)$/.test(one.name));
  if (acts.length) found.push(tw.card("Behaviour", "shares of replies", tw.chart(acts.map((one, index) => ({ label: one.name.slice(10).replaceAll("_", " "), color: index, ...one })), { title: "Behaviour", unit: "share", range: [0, 1] })));
  const ends = run.metrics.filter((one) => /^rollout\/stop_\w+_share$/.test(one.name));
  if (ends.length) found.push(tw.card("How attempts end", "share", tw.chart(ends.map((one, index) => ({ label: one.name.slice(13, -6), color: index, ...one })), { title: "End reasons", unit: "share", range: [0, 1], stacked: true })));
  const pool = run.metrics.filter((one) => /^pool\/(staleness_mean|staleness_max)$/.test(one.name));
  if (pool.length) found.push(tw.card("Staleness", "updates between sampling and learning", tw.chart(pool.map((one, index) => ({ label: one.name.slice(15), color: index, ...one })), { title: "Staleness" })));
  const drift = [["drift/abs_mean", "mean"], ["drift/abs_max", "worst token"]].map(([name, label], index) => line(run, name, label, index)).filter((one) => one.x.length);
  if (drift.length) found.push(tw.card("Drift", "gap of sampler and trainer on the same weights, nats per token", tw.chart(drift, { title: "Drift" })));
  const groups = run.metrics.filter((one) => /^pool\/groups_(queued|running|done)$/.test(one.name));
  if (groups.length) found.push(tw.card("Pool", "groups, when a step ended", tw.chart(groups.map((one, index) => ({ label: one.name.slice(12), color: index, ...one })), { title: "Pool" })));
  const named = (pattern) => run.metrics.filter((one) => pattern.test(one.name)).map((one, index) => ({ ...one, label: pattern.exec(one.name)[1].replaceAll("_", " "), color: index }));
  const rewards = named(/^opponent\/reward_(\w+)_mean$/), ratings = named(/^opponent\/elo_(\w+)$/);
  if (rewards.length) found.push(tw.card("Reward by opponent", "of the policy, in training", tw.chart(rewards, { title: "Reward by opponent" })));
  if (ratings.length) found.push(tw.card("Ratings", "Elo of the pool's members and of the policy's snapshots", tw.chart(ratings, { title: "Ratings" })));
  const deals = named(/^rollout\/env_(agreement|joint|payoff|other_payoff)_mean$/);
  if (deals.length > 1) found.push(tw.card("Deals", "share of games with a deal, and payoffs as shares", tw.chart(deals, { title: "Deals", unit: "share", range: [0, 1] })));
  const critic = ["train/critic_explained_variance"].map((name, index) => line(run, name, "explained variance", index)).filter((one) => one.x.length);
  if (critic.length) found.push(tw.card("Critic", "explained variance of returns", tw.chart(critic, { title: "Critic" })));
  return found;
};

const smallChart = (one) => h("figure", { class: "small-chart", title: `${one.meaning}${one.unit ? ` (${one.unit})` : ""}` },
  h("figcaption", {}, h("span", {}, one.name.split("/")[1]), h("b", {}, tw.amount(one.y[one.y.length - 1], one.unit))),
  tw.chart([{ label: one.name, color: 0, ...one }], { title: one.name, unit: one.unit, height: 96, legend: false }),
  h("p", { class: "note" }, one.meaning, one.unit ? ` (${one.unit})` : ""));

const paper = (name, title, opened, ...children) => h("details", { class: "paper card", "data-paper": name, open: opened.has(name) }, h("summary", {}, title), ...children);
const makePapers = (run, opened) => {
  const exact = run.certificates.every((one) => one.is_exact);
  const verdict = !run.certificates.length ? "none yet" : exact ? "every trained token is a sampled token" : "not exact";
  return [
    paper("certificate", ["Certificate ", tw.pill(verdict, !run.certificates.length ? "" : exact ? "good" : "bad")], opened,
      run.certificates.length ? run.certificates.map((one) => h("pre", {}, `step ${one.step}: ${one.lines.join("\n")}`)) : h("p", { class: "empty" }, "No step has trained on attempts of this run.")),
    paper("plan", "Plan", opened, run.plan ? h("pre", {}, run.plan) : h("p", { class: "empty" }, "Not recorded: this run was started before plans were stored.")),
    paper("config", "Config", opened, h("pre", {}, run.config)),
    paper("events", ["Events ", h("small", {}, String(run.events.length))], opened, h("table", { class: "rows" }, h("tbody", {}, [...run.events].reverse().map((event) =>
      h("tr", {}, h("td", { class: "n" }, tw.clock(event.time)), h("td", { class: "n" }, `step ${event.step}`), h("td", {}, event.kind), h("td", {}, h("code", {}, event.detail))))))),
    paper("checkpoints", ["Checkpoints ", h("small", {}, String(run.checkpoints.length))], opened, h("table", { class: "rows" }, h("tbody", {}, run.checkpoints.map((one) =>
      h("tr", {}, h("td", { class: "n" }, `step ${one.step}`), h("td", {}, h("code", {}, one.path))))))),
  ];
};
})();
