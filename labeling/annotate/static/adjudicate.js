// The adjudication page: only the steps that people rated differently, their votes side by side without names. A decision
// is an event of its own and goes through the same outbox as labels.

import {ask, drawStep, el, textBox, themeButton} from "./view.js";
import {Outbox, newId} from "./outbox.js";
import {keyOf} from "./keys.js";

const RATINGS = {3: "good", 2: "neutral", 1: "bad"};
const GLYPH = {good: "✓", neutral: "–", bad: "✗"};
const PAGE = 20;
const $ = (id) => document.getElementById(id);

let me, outbox, cases = [], boxes = [], cursor = 0, first = 0, undone = [], redone = [];
const texts = new Map();

function decide(at, decision, history = true) {
  const one = cases[at], before = one.decision;
  const event = {id: newId(), trajectory_id: one.trajectory_id, step: one.step, op: "decision", value: decision,
    group: newId(), kind: "do", time: new Date().toISOString()};
  try {
    outbox.add([event]);
  } catch (error) {
    $("alerts").replaceChildren(el("p", {}, `This browser's storage is full: this decision was NOT kept. (${error.name})`));
    return;
  }
  one.decision = decision;
  if (history) { undone.push([at, before, decision]); redone = []; }
  paint(at);
  $("live").textContent = decision ? `Decided: ${decision.rating}.` : "Decision taken back.";
}

function rate(at, rating) {
  const comment = noteOf(at);
  decide(at, comment ? {rating, comment} : {rating});
  moveTo(at + 1);
}

const noteOf = (at) => boxes[at - first]?.querySelector("textarea").value.trim() ?? "";

function undo(from, to, which) {
  const last = from.pop();
  if (!last) { $("live").textContent = "Nothing more."; return; }
  to.push(last);
  decide(last[0], last[which], false);
  moveTo(last[0]);
}

function paint(at) {
  const box = boxes[at - first], {decision} = cases[at];
  if (box) {
    for (const button of box.querySelectorAll("[data-decide]")) {
      button.setAttribute("aria-pressed", String(button.dataset.decide === decision?.rating));
    }
  }
  $("count").textContent = `${cases.filter((one) => one.decision).length} of ${cases.length} decided`;
}

async function moveTo(at) {
  const next = Math.max(0, Math.min(cases.length - 1, at));
  if (next < first || next >= first + boxes.length) await draw(next);
  boxes[cursor - first]?.classList.remove("current");
  boxes[cursor - first]?.removeAttribute("aria-current");
  cursor = next;
  boxes[cursor - first].classList.add("current");
  boxes[cursor - first].setAttribute("aria-current", "true");
  boxes[cursor - first].scrollIntoView({block: "start"});
}

async function textOf(id) {
  if (!texts.has(id)) texts.set(id, await ask("/api/trajectory/" + encodeURIComponent(id)));
  return texts.get(id);
}

async function drawCase(one, at) {
  const text = await textOf(one.trajectory_id), step = text.steps[one.step], number = at + 1;
  const votes = one.votes.map((vote, i) => {
    const letter = String.fromCharCode(65 + i);
    const lines = [vote.confidence && `confidence: ${vote.confidence}`, vote.errors && vote.errors.join(", "), vote.comment];
    return el("div", {class: "vote", "data-rating": vote.rating}, el("h3", {}, `${letter}: ${GLYPH[vote.rating]} ${vote.rating}`),
      ...lines.filter(Boolean).map((line) => el("p", {}, line)));
  });
  const before = el("details", {}, el("summary", {}, `The ${one.step} steps before, and the task`));
  before.addEventListener("toggle", () => {
    if (before.childElementCount > 1) return;
    before.append(textBox(text.task, {kind: "plain", label: "Task"}),
      el("ol", {class: "steps"}, ...text.steps.slice(0, one.step).map((earlier, k) => drawStep(earlier, k))));
  });
  const note = el("textarea", {id: `note-${at}`, rows: "1", maxlength: "20000"});
  note.value = one.decision?.comment || "";
  note.addEventListener("change", () => {
    const {decision} = cases[at], comment = note.value.trim();
    if (decision) decide(at, comment ? {rating: decision.rating, comment} : {rating: decision.rating});
  });
  const buttons = Object.entries(RATINGS).reverse().map(([key, name]) => el("button",
    {type: "button", "data-decide": name, "data-rating": name, "aria-pressed": "false", onclick: () => rate(at, name)},
    `${GLYPH[name]} ${name}`, el("kbd", {}, key)));
  const drawn = el("ul", {class: "steps"}, drawStep(step, one.step, {last: one.step + 1 === text.steps.length}));
  return el("section", {class: "case", "aria-labelledby": `case-${at}`},
    el("h2", {id: `case-${at}`}, `Disagreement ${number}: step ${one.step + 1} of ${text.steps.length}`),
    before, drawn, el("div", {class: "votes"}, ...votes),
    el("div", {class: "decide", role: "group", "aria-label": `Decision ${number}`}, ...buttons),
    el("p", {}, el("label", {for: `note-${at}`}, "Reason (optional)"), note));
}

async function draw(at) {
  first = Math.floor(at / PAGE) * PAGE;
  const shown = cases.slice(first, first + PAGE);
  boxes = await Promise.all(shown.map((one, i) => drawCase(one, first + i)));
  const last = first + boxes.length;
  const pager = cases.length > PAGE ? el("p", {class: "decide"},
    el("button", {type: "button", disabled: first === 0, onclick: () => moveTo(first - 1)}, "Before"),
    ` ${first + 1} to ${last} of ${cases.length} `,
    el("button", {type: "button", disabled: last === cases.length, onclick: () => moveTo(last)}, "After")) : "";
  $("main").replaceChildren(el("h2", {class: "visually-hidden"}, "Disagreements"), ...boxes, pager);
  shown.forEach((_, i) => paint(first + i));
}

function onKey(event) {
  if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input, textarea");
  if (typing) { if (event.key === "Escape") typing.blur(); return; }
  if (!cases.length) return;
  const key = keyOf(event), moves = {j: 1, arrowdown: 1, k: -1, arrowup: -1};
  if (key in moves) { moveTo(cursor + moves[key]); event.preventDefault(); return; }
  if (event.repeat) return;
  if (RATINGS[key]) rate(cursor, RATINGS[key]);
  else if (key === "u" && !event.shiftKey) undo(undone, redone, 1);
  else if (key === "u" || key === "y") undo(redone, undone, 2);
  else if (key === "c") boxes[cursor - first].querySelector("textarea").focus();
  else return;
  event.preventDefault();
}

function onOutbox({waiting, error, refused}) {
  $("saved").dataset.state = error ? "away" : waiting ? "sending" : "saved";
  $("saved").textContent = error ? `${waiting} waiting` : waiting ? "saving…" : "saved";
  const said = refused ? `The server refused a decision for good: ${refused}`
    : error ? `Not saved on the server: ${error.message}. Decisions are kept here and sent again.` : "";
  if (said) $("alerts").replaceChildren(el("p", {}, said));
  else if (!error) $("alerts").replaceChildren();
}

async function start() {
  try {
    me = await ask("/api/me");
    cases = await ask("/api/disagreements");
  } catch (error) {
    if (error.status === 401) { location.href = "/login"; return; }
    $("alerts").replaceChildren(el("p", {}, error.message));
    return;
  }
  $("top").append(el("h1", {}, "Adjudicate"), el("span", {class: "hint"}, "3 2 1 decide · j k move · u undo · c reason"),
    el("span", {class: "spring"}), el("span", {id: "count"}), el("span", {id: "saved", "data-state": "saved"}, "saved"),
    el("nav", {"aria-label": "Pages"}, el("a", {href: "/"}, "Label"), el("a", {href: "/agreement"}, "Agreement")),
    el("span", {class: "who"}, me.name), themeButton());
  outbox = new Outbox(me.project, me.name, onOutbox);
  outbox.send();
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && event.detail) button.blur();
  });
  if (!cases.length) {
    $("main").replaceChildren(el("section", {class: "done"}, el("h2", {}, "No disagreements"),
      el("p", {}, "No step has two different ratings.")));
    return;
  }
  const open = cases.findIndex((one) => !one.decision);
  await draw(open < 0 ? 0 : open);
  await moveTo(open < 0 ? 0 : open);
}

start();
