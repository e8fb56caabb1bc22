// The live page: asks /v1/live again and again and draws what it says. Text goes in by textContent only.
"use strict";

const PERIOD_MS = 700;
const SHOWN_TURNS = 30;
const KEY = "precache-key";
const COLOURS = 6;

const byId = (id) => document.getElementById(id);
const turns = new Map(); // number -> turn
let agents = []; // adapters in the order of loading; their place is their colour
let baseName = "";

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

function colourOf(name) {
  const place = agents.indexOf(name);
  return place < 0 ? "base" : `a${place % COLOURS}`;
}

const shown = (name) => (name === "base" ? baseName : name);
const count = (number) => number.toLocaleString("en");
const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${unit ? size.toFixed(size < 10 ? 1 : 0) : size} ${units[unit]}`;
}

function seconds(time) {
  if (time === null || time === undefined) return "";
  return time < 1 ? `${Math.round(1000 * time)} ms` : `${time.toFixed(1)} s`;
}

function segment(className, part, whole, title) {
  const made = element("i", className);
  made.style.width = `${(100 * part) / whole}%`;
  made.title = title;
  return made;
}

function fill(id, children) {
  byId(id).replaceChildren(...children);
}

// -- parts of the page --------------------------------------------------------------------------------------------

function drawHead(live) {
  const schedule = live.schedule ? `, ${live.schedule}` : "";
  byId("policy").textContent = `${live.policy}${schedule} · ${count(live.context_window)} tokens of context`;
  const waiting = live.waiting ? `, ${live.waiting} waiting` : "";
  const pending = live.sessions.reduce((sum, session) => sum + session.pending_tokens, 0);
  const idle = pending ? `neutral pass: ${count(pending)} tokens to go` : "idle";
  const state = byId("state");
  state.textContent = live.running ? `running${waiting}` : idle;
  state.className = live.running || pending ? "running" : "";
}

function drawLegend(live) {
  const names = [baseName, ...agents];
  fill("legend", names.map((name) => {
    const item = element("li", "", name);
    item.prepend(element("i", colourOf(name)));
    return item;
  }));
}

function drawHints(live) {
  fill("hints", live.hints.slice(-3).reverse().map((hint) => element("li", "",
    `${hint.first_model} and ${hint.second_model} cannot share their history: about ${count(hint.common_tokens)} tokens ` +
    `of it are the same, but the prompts differ from token ${count(hint.position)} on. After “${hint.before}” one goes ` +
    `on with “${hint.first}”, the other with “${hint.second}”. Put the text of the role last.`)));
}

// What the prompt's tokens cost: those that were in the cache and ran again for their reader count as computed.
function spent(turn) {
  const again = turn.catch_up_tokens;
  const reused = turn.cached_tokens - again;
  const others = Math.max(0, turn.shared_tokens - again);
  return { reused, others, own: reused - others, again, computed: turn.computed_tokens + again };
}

function drawTotals(live) {
  const done = [...turns.values()].filter((turn) => turn.state === "done").map((turn) => ({ ...turn, ...spent(turn) }));
  const sum = (field) => done.reduce((total, turn) => total + turn[field], 0);
  const times = done.map((turn) => turn.ttft_s).sort((a, b) => a - b);
  byId("reused-share").textContent = percent(sum("reused"), sum("prompt_tokens"));
  byId("shared-share").textContent = percent(sum("others"), sum("prompt_tokens"));
  byId("ttft").textContent = times.length ? seconds(times[times.length >> 1]) : "–";
  byId("evictions").textContent = count(live.stats.evictions);
}

function drawSessions(live) {
  const sessions = [...live.sessions].reverse();
  const longest = Math.max(1, ...sessions.map((session) => session.length));
  if (!sessions.length) return fill("sessions", [element("p", "none", "Nothing is cached yet.")]);
  fill("sessions", sessions.slice(0, 12).map((session) => drawSession(session, longest)));
}

function drawSession(session, longest) {
  const box = element("div", "session");
  const head = element("p");
  head.append(element("b", "", session.session_id), element("span", "", `${count(session.length)} tokens`),
    element("span", "", bytes(session.bytes)));
  if (session.busy) head.append(element("span", "", "in use"));
  if (session.pending_tokens) head.append(element("span", "", `${count(session.pending_tokens)} await the neutral pass`));
  const band = element("div", "band");
  for (const run of session.writers) {
    const title = `${shown(run.name)}: tokens ${run.start} to ${run.end}`;
    band.append(segment(colourOf(run.name), run.end - run.start, longest, title));
  }
  box.append(head, band);
  for (const strip of session.strips) {
    const line = element("div", "strip");
    const what = strip.kind === "strip" ? `strip of ${strip.readers.join(", ") || "nobody"}` : strip.kind;
    line.title = `${what}: ${bytes(strip.bytes)}`;
    for (const [start, end] of strip.covered) {
      const part = segment(colourOf(strip.readers[0]), end - start, longest, line.title);
      part.style.left = `${(100 * start) / longest}%`;
      line.append(part);
    }
    box.append(line);
  }
  return box;
}

function drawTurns() {
  const recent = [...turns.values()].slice(-SHOWN_TURNS).reverse();
  const longest = Math.max(1, ...recent.map((turn) => turn.prompt_tokens));
  fill("turns", recent.map((turn) => drawTurn(turn, longest)));
}

function drawTurn(turn, longest) {
  const row = element("tr", turn.state);
  const name = element("td", "", turn.model);
  name.prepend(element("i", `name ${colourOf(turn.model)}`));
  const band = element("div", "band");
  const tokens = spent(turn);
  if (turn.state === "done") {
    const again = tokens.again ? `computed, ${tokens.again} of them again for this reader` : "computed";
    for (const [kind, text] of [["own", "reused"], ["others", "reused, written by another agent"], ["computed", again]]) {
      if (tokens[kind]) band.append(segment(kind, tokens[kind], longest, `${tokens[kind]} ${text}`));
    }
  }
  const bar = element("td", "wide");
  bar.append(band);
  const number = (value) => element("td", "num", value);
  const done = turn.state === "done";
  const outcome = done ? (turn.lookup || "").replaceAll("_", " ") : (turn.finish_reason || turn.state);
  row.append(name, bar, number(done ? count(tokens.reused) : ""), number(done ? count(tokens.computed) : ""),
    number(count(turn.completion_tokens)), number(seconds(turn.ttft_s)), number(seconds(turn.total_s)),
    element("td", "", outcome));
  return row;
}

function drawMemory(live) {
  const { bytes_held: held, budget, peak_bytes: peak } = live.stats;
  const names = Object.keys(live.parts).filter((part) => live.parts[part] > 0);
  const colour = (part) => (part.startsWith("strip ") ? colourOf(part.slice(6).split("+")[0]) : "base");
  const label = (part) => (part === "base" ? "base K and V" : part);
  const full = held > budget / 20;
  byId("memory-text").textContent = `${bytes(held)} of ${bytes(budget)} (${percent(held, budget)}), most so far ` +
    `${bytes(peak)}.${full || !held ? "" : " The bar shows what is held, not the budget."}`;
  const whole = full ? budget : Math.max(held, 1);
  fill("memory", names.map((part) =>
    segment(colour(part), live.parts[part], whole, `${label(part)}: ${bytes(live.parts[part])}`)));
  fill("parts", names.map((part) => {
    const item = element("li", "", `${label(part)} ${bytes(live.parts[part])}`);
    item.prepend(element("i", colour(part)));
    return item;
  }));
}

function drawLookups(live) {
  const found = Object.entries(live.stats.lookups).sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, ...found.map(([, number]) => number));
  const rows = found.flatMap(([reason, number]) => {
    const band = element("div", "band");
    band.append(segment(reason === "hit" ? "others" : "base", number, most, `${number}`));
    const cell = element("dd");
    cell.append(band);
    return [element("dt", "", reason.replaceAll("_", " ")), cell, element("dd", "num", count(number))];
  });
  fill("lookups", rows);
}

// -- asking -------------------------------------------------------------------------------------------------------

function take(live) {
  [baseName, ...agents] = live.models;
  for (const turn of live.turns) turns.set(turn.number, turn);
  while (turns.size > 200) turns.delete(turns.keys().next().value);
  for (const draw of [drawHead, drawLegend, drawHints, drawTotals, drawSessions, drawTurns, drawMemory, drawLookups]) {
    draw(live);
  }
}

function lastSettled() {
  let last = 0;
  for (const turn of turns.values()) {
    if (turn.state === "running") break;
    last = turn.number;
  }
  return last;
}

async function ask() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(`/v1/live?after=${lastSettled()}`, { headers, cache: "no-store" });
  const refused = response.status === 401;
  byId("sign-in").hidden = !refused;
  byId("main").hidden = refused;
  if (refused) {
    byId("state").textContent = "an API key is needed";
    byId("key-error").textContent = key ? "This key is not valid." : "";
    sessionStorage.removeItem(KEY);
    return false;
  }
  if (!response.ok) throw new Error(`status ${response.status}`);
  take(await response.json());
  return true;
}

async function loop() {
  try {
    if (!document.hidden && !(await ask())) return; // the form starts it again
  } catch (error) {
    byId("state").textContent = "no connection";
    byId("state").className = "lost";
  }
  setTimeout(loop, PERIOD_MS);
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = byId("key-error").textContent = "";
  loop();
});

loop();
