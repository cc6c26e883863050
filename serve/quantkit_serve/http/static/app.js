// The page: asks for /live once a second while it is seen, and gives the document to its parts.
import { drawSpeed, drawSteps } from "./charts.js";
import { startChat } from "./chat.js";
import { PageMap } from "./pages.js";

const PERIOD_MS = 1000;
const KEPT = 120; // samples of throughput
const byId = (id) => document.getElementById(id);
const map = new PageMap(byId("pages"), byId("owners"), byId("page-note"));
const samples = [];
let last = null;
let current = null;

export function headers() {
  const key = byId("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function status(text, kind) {
  const pill = byId("status");
  if (pill.textContent !== text) pill.textContent = text; // a status role speaks at every change
  pill.className = `pill ${kind}`;
}

function tile(name, value, isBad) {
  const box = document.createElement("div");
  const term = document.createElement("dt");
  const number = document.createElement("dd");
  term.textContent = name;
  number.textContent = value;
  if (isBad) box.className = "bad";
  box.append(term, number);
  return box;
}

const count = (n) => n.toLocaleString("en");

function showTiles(live, sample) {
  const f = live.figures;
  const ended = (...reasons) => reasons.map((reason) => count(f.finished[reason] ?? 0)).join(" / ");
  byId("tiles").replaceChildren(
    tile("running", count(f.num_running)),
    tile("waiting", count(f.num_waiting)),
    tile("generated/s", count(Math.round(sample.decode))),
    tile("prompt/s", count(Math.round(sample.prefill))),
    tile("KV pages used", `${(100 * sample.usage).toFixed(0)} %`),
    tile("cached pages", count(f.num_pages_cached)),
    tile("quarantined", count(f.num_pages_quarantined)),
    tile("preemptions", count(f.preemptions)),
    tile("prefill / decode steps", `${count(f.prefill_steps)} / ${count(f.decode_steps)}`),
    tile("answers: stop / length", ended("stop", "length")),
    tile("aborted / failed", ended("abort", "error")),
    tile("tag checks", live.has_tags ? count(f.kv_tag_checks) : "off"),
    tile("tag mismatches", live.has_tags ? count(f.kv_tag_mismatches) : "off", f.kv_tag_mismatches > 0),
  );
}

function showFindings(live) {
  const found = live.figures.findings;
  byId("findings-box").hidden = found.length === 0;
  byId("findings").replaceChildren(...found.toReversed().map(([where, page, owner, holders]) => {
    const row = document.createElement("tr");
    for (const text of [where, page, owner || (where === "prefix" ? "the prefix cache" : "–"), holders.join(", ") || "nobody"]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  }));
  const alarm = byId("alarm");
  const n = live.figures.kv_tag_mismatches;
  alarm.hidden = n === 0;
  const text = `${count(n)} tag ${n === 1 ? "mismatch" : "mismatches"}: a page was not the request's own; ` +
    "that request was ended, the others go on.";
  if (n && alarm.textContent !== text) alarm.textContent = text;
}

function sampled(live, now) {
  const f = live.figures;
  const computed = f.prompt_tokens - f.cached_tokens;
  const seconds = last ? (now - last.now) / 1000 : 0;
  const rate = (value, before) => (seconds > 0 ? Math.max(value - before, 0) / seconds : 0);
  const sample = {
    decode: rate(f.generated_tokens, last?.generated),
    prefill: rate(computed, last?.computed),
    usage: f.num_pages ? f.num_pages_used / f.num_pages : 0,
  };
  if (last) samples.push(sample); // the first has no rates
  last = { now, generated: f.generated_tokens, computed };
  if (samples.length > KEPT) samples.shift();
  return sample;
}

function draw() {
  if (!current) return;
  drawSpeed(byId("speed"), byId("speed-note"), samples, KEPT);
  drawSteps(byId("steps"), byId("steps-note"), current.steps);
  map.show(current.pages, current.figures.findings);
}

function show(live) {
  current = live;
  byId("model").textContent = live.model;
  if (!live.is_ok) status(live.reason || "not well", "bad");
  else if (live.is_draining) status("shutting down", "bad");
  else status("running", "ok");
  showTiles(live, sampled(live, performance.now()));
  showFindings(live);
  draw();
}

async function ask() {
  try {
    const got = await fetch("live", { headers: headers(), signal: AbortSignal.timeout(5000) });
    if (got.status === 401) status("needs an API key", "bad");
    else if (!got.ok) status(`answers ${got.status}`, "bad");
    else show(await got.json());
  } catch {
    status("not reachable", "bad");
  }
}

async function loop() {
  if (!document.hidden) await ask();
  setTimeout(loop, PERIOD_MS);
}

addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
startChat(headers);
loop();
