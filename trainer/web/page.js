// Draws the state of a run from the JSON API, once a second. Text from nodes is only ever set as text.
"use strict";

const PERIOD_MS = 1000;
const steps = [];

const at = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const time = (ms) => new Date(ms).toLocaleTimeString();
const tail = (peer) => "…" + peer.slice(-10);

function lasted(sinceMs, nowMs) {
  if (sinceMs === null) return "";
  const seconds = Math.max(0, Math.floor((nowMs - sinceMs) / 1000));
  if (seconds < 120) return "for " + seconds + " s";
  return seconds < 7200 ? "for " + Math.floor(seconds / 60) + " min" : "for " + Math.floor(seconds / 3600) + " h";
}

async function get(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(10000) });
  if (!response.ok) throw new Error(path + " answered " + response.status);
  return response.json();
}

// Of the last step; bad beyond what raises an alarm (trainer/learner.py).
function learning(step) {
  if (!step) return [];
  return [
    ["KL to the drawer", number(step.kl, 4), step.kl > 0.01],
    ["ESS share", number(step.ess, 2), step.ess < 0.5],
    ["masked", number(100 * step.masked, 1) + " %", step.masked > 0.02],
    ["clipped", number(100 * step.clipped, 1) + " %", step.clipped > 0.2],
    ["entropy, nats", number(step.entropy, 2)],
    ["gradient norm", number(step.gradient_norm, 2)],
  ];
}

function figures(state) {
  const shown = [
    ["policy version", number(state.version)],
    ["mean reward", number(state.reward_mean, 3)],
    ["traces admitted", number(state.accepted)],
    ["traces refused", number(state.refused)],
    ["audited", number(state.audited)],
    ["tokens a second", number(state.tokens_per_second)],
    ["staleness", number(state.staleness_mean, 1)],
    ["nodes", number(state.nodes.filter((node) => node.connected).length)],
    ...(state.evaluation ? [["held-out reward, v" + state.evaluation.version, number(state.evaluation.reward_mean, 3)]] : []),
    ...learning(state.last_step),
  ];
  at("figures").replaceChildren(...shown.map(([label, value, bad]) => {
    const box = document.createElement("div");
    box.className = bad ? "figure bad" : "figure";
    const strong = document.createElement("b");
    strong.textContent = value;
    const name = document.createElement("span");
    name.textContent = label;
    box.append(strong, name);
    return box;
  }));
}

function fill(table, rows) {
  at(table).tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const [text, kind, title] of cells) {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (kind) cell.className = kind;
      if (title) cell.title = title;
      row.append(cell);
    }
    return row;
  }));
}

function nodeRow(node, now) {
  return [
    [[tail(node.node), node.home && "home", node.trusted && "trusted", node.lied && "trust lost: " + node.lied].filter(Boolean).join(" · "), "", node.node],
    [[node.doing, lasted(node.doing_since_ms, now)].join(" ").trim(), node.connected ? "good" : "soft"],
    [number(node.policy_version), "n"],
    [number(node.tokens_per_second), "n"],
    [node.slots_busy + "/" + node.slots_total, "n"],
    [number(node.slots_waiting), "n"],
    [node.cache_percent === null ? "–" : number(node.cache_percent) + " %", "n"],
    [number(node.accepted), "n"],
    [number(node.refused), node.refused ? "n bad" : "n"],
    [number(node.audits_passed) + (node.audits_failed ? " (" + node.audits_failed + " failed)" : ""), node.audits_failed ? "n bad" : "n"],
    [number(100 * node.rate) + " %", "n"],
    [number(node.stake, 2), "n"],
    [number(node.expired), "n"],
    [node.engine, "soft"],
  ];
}

const size = (bytes) => bytes === null ? "–" : bytes >= 1e6 ? number(bytes / 1e6, 1) + " MB" : number(bytes / 1e3, 1) + " kB";
const seconds = (value) => value === null ? "–" : number(value, 1) + " s";

function policyRow(policy) {
  return [
    [number(policy.version), "n"],
    [time(policy.published_ms), "soft"],
    [size(policy.bytes), "n"],
    [policy.delta_bytes === null ? "none" : size(policy.delta_bytes), "n"],
    [policy.ratio === null ? "–" : number(policy.ratio) + "×", "n"],
    [number(policy.nodes), "n"],
    [seconds(policy.median_seconds), "n"],
    [seconds(policy.slowest_seconds), "n"],
  ];
}

const span = (value) => value < 1 ? number(1000 * value) + " ms" : number(value, 2) + " s";

// Bars begin where the stage before ended; "node" is the whole of what nodes say of themselves, where they do.
function stageRows(stages) {
  const beside = (each) => each.stage === "node" && stages.some((other) => other.claimed);
  const whole = stages.reduce((sum, each) => sum + (beside(each) ? 0 : each.mean), 0) || 1;
  let start = 0;
  fill("stages", stages.map((each) => [
    [each.title], [each.claimed ? "nodes, unchecked" : "the trainer", "soft"],
    [span(each.mean), "n"], [span(each.p95), "n"], [number(each.count), "n"], ["", "wide"],
  ]));
  stages.forEach((each, i) => {
    const begin = beside(each) ? 0 : start;
    if (!beside(each)) start += each.mean;
    const bar = element("svg", { class: "bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": each.title });
    bar.append(element("rect", { x: 1000 * begin / whole, y: 0, width: Math.max(2, 1000 * each.mean / whole), height: 10, class: each.claimed ? "claimed" : "seen" }));
    at("stages").tBodies[0].rows[i].cells[5].append(bar);
  });
}

function rateRow(rate) {
  const share = (count) => number(100 * count / rate.leased, 1) + " %";
  const lag = rate.lag_mean === null ? "–" : number(rate.lag_mean, 1) + " (" + number(rate.lag_most) + ")";
  return [
    [rate.by, "soft"], [rate.kind], [number(rate.leased), "n"],
    ...["completed", "expired", "returned", "refused", "stale", "used"].map((end) => [share(rate[end]), "n"]),
    [lag, "n"],
  ];
}

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function chart(id, values, top) {
  const svg = at(id);
  const width = svg.clientWidth || 400, height = svg.clientHeight || 190, left = 34, foot = 18;
  const highest = Math.max(top, ...values.map((point) => point[1]));
  const first = values.length ? values[0][0] : 0, last = values.length ? values[values.length - 1][0] : 1;
  const x = (version) => left + (width - left - 4) * (version - first) / Math.max(1, last - first);
  const y = (value) => 6 + (height - foot - 6) * (1 - value / highest);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const value = highest * share;
    parts.push(element("line", { class: "grid", x1: left, x2: width, y1: y(value), y2: y(value) }));
    parts.push(element("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, highest > 4 ? 0 : 1)));
  }
  if (values.length) {
    parts.push(element("text", { x: left, y: height - 2 }, "v" + first));
    parts.push(element("text", { x: width, y: height - 2, "text-anchor": "end" }, "v" + last));
    const path = values.map(([version, value], i) => (i ? "L" : "M") + x(version).toFixed(1) + " " + y(value).toFixed(1)).join("");
    parts.push(element("path", { class: "curve", d: path }));
  }
  svg.replaceChildren(...parts);
}

async function refresh() {
  const after = steps.length ? steps[steps.length - 1].version : -1;
  const [state, fresh, refused, happened, stages] = await Promise.all([
    get("api/state"), get("api/steps?after=" + after), get("api/refusals?most=30"), get("api/events?most=30"), get("api/stages"),
  ]);
  steps.push(...fresh);
  document.title = state.name + " · v" + state.version;
  at("name").textContent = state.name;
  figures(state);
  chart("reward", steps.map((step) => [step.version, step.reward_mean]), 1);
  chart("staleness", steps.map((step) => [step.version, step.staleness_mean]), 4);
  at("join").textContent = state.address ? "rlnode join " + state.address : "the gateway is starting…";
  fill("nodes", state.nodes.map((node) => nodeRow(node, state.at_ms)));
  stageRows(stages);
  fill("policies", state.policies.map(policyRow));
  fill("rates", state.rates.map(rateRow));
  at("losses").textContent = state.losses.join(" · ");
  at("losses").className = state.losses.length ? "hint bad" : "hint";
  fill("waits", state.waits.map((each) => [[each.part], [each.what, "wide"], [lasted(each.since_ms, state.at_ms), "soft"]]));
  at("pairs").textContent = state.pairs.map((each) => each.pair + ": " + (each.note === null ? "calibrated" : "new, audited in full (" + each.note + ")")).join(" · ");
  const reasons = Object.entries(state.refusals).map(([reason, count]) => reason + " " + count);
  at("reasons").textContent = reasons.length ? reasons.join(" · ") : "none so far";
  fill("refusals", refused.map((each) => [[time(each.judged_ms), "soft"], [each.reason, "bad"], [tail(each.node), "", each.node], [each.digest.slice(0, 16) + "…", "soft", each.digest]]));
  fill("events", happened.map((each) => [[time(each.at_ms), "soft"], [each.kind], [each.text, "wide"]]));
}

async function run() {
  const status = at("connection");
  try {
    await refresh();
    status.textContent = "live";
    status.className = "";
  } catch (error) {
    status.textContent = "no answer from the trainer, trying again (" + error.message + ")";
    status.className = "lost";
  }
  setTimeout(run, PERIOD_MS);
}

at("copy").addEventListener("click", () => navigator.clipboard.writeText(at("join").textContent));
run();
