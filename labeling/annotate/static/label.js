// The labelling page. What is on screen is derived from the item's events; a key press adds events and repaints one step.

import {ask, drawStep, el, scoreClass, textBox, themeButton} from "./view.js";
import {Outbox, newId} from "./outbox.js";
import {keyFor, redoing, stacks, undoing} from "./history.js";
import {keyOf, showHelp} from "./keys.js";
import {$, alertOnce, announce, clearAlert} from "./messages.js";

const RATINGS = {1: "bad", 2: "neutral", 3: "good"};
const GLYPH = {good: "✓", neutral: "–", bad: "✗"};
const SURE = 0.8;  // P(good) from which a run of pre-labels is accepted by one key
const CONFIDENCES = {q: "low", w: "medium", e: "high"};
const TAIL = document.createDocumentFragment();
TAIL.append(el("span", {class: "spring"}), el("span", {class: "how"}), el("span", {class: "rate", role: "group"},
  ...Object.entries(RATINGS).map(([key, name]) => el("button", {type: "button", tabindex: "-1", "data-rating": name,
    "aria-pressed": "false", title: `${name} (${key})`}, GLYPH[name]))));

let me, outbox, item, cursor = 0, values = new Map(), rows = [], spots = [], tails = [], emptySubmit = false, retry = null;
const channel = "BroadcastChannel" in window ? new BroadcastChannel("prm-annotate") : null;

// --- events and what follows from them --------------------------------------------------------------------------------

const get = (step, op) => values.get(keyFor(step, op)) ?? null;
const rating = (step) => get(step, "rating")?.rating ?? null;

function apply(event) {
  item.history.push(event);
  values.set(keyFor(event.step, event.op), event.value);
}

/** Add changes [{step, op, value}] as one group: kept in the browser first, then shown. False where it cannot be kept. */
function say(changes, {kind = "do", of = ""} = {}) {
  const group = newId(), time = new Date().toISOString();
  const events = changes.map((change) => ({id: newId(), trajectory_id: item.id, group, kind, of, time, ...change}));
  try {
    outbox.add(events);
  } catch (error) {
    alertOnce("full", `This browser's storage is full: this label was NOT kept. (${error.name})`);
    return false;
  }
  clearAlert("full");
  events.forEach(apply);
  channel?.postMessage({project: me.project, annotator: me.name, item: item.id, events});
  repaint(changes.map((change) => change.step));
  return true;
}

/** Undo or redo a group: new events that set its fields to what they were, or were made, before. */
function replay(group, kind) {
  const changes = kind === "undo" ? undoing(item.history, group) : redoing(item.history, group);
  if (!say(changes, {kind, of: group})) return;
  const steps = changes.map((change) => change.step).filter((step) => step !== null);
  if (steps.length) moveTo(Math.max(...steps));
  announce(`${kind === "undo" ? "Undone" : "Redone"}: ${[...new Set(changes.map((change) => change.op))].join(", ")}`, true);
}

function undo() {
  const {undo: groups} = stacks(item.history);
  if (groups.length) replay(groups[groups.length - 1], "undo");
  else announce("Nothing to undo here. p opens the item before.", true);
}

function redo() {
  const {redo: groups} = stacks(item.history);
  if (groups.length) replay(groups[groups.length - 1], "redo");
  else announce("Nothing to redo.", true);
}

// --- what a key or a click does ---------------------------------------------------------------------------------------

function rate(step, value, how = "manual") {
  const same = rating(step) === value && get(step, "rating").how === how;
  if (!same && !say([{step, op: "rating", value: {rating: value, how}}])) return;
  announce(`Step ${step + 1} ${value}.`);
  moveTo(step + 1);
}

function firstError(step) {
  const changes = [];
  for (let k = 0; k < step; k++) {
    if (!rating(k)) changes.push({step: k, op: "rating", value: {rating: "good", how: "first_error_fill"}});
  }
  if (rating(step) !== "bad") changes.push({step, op: "rating", value: {rating: "bad", how: "manual"}});
  if (changes.length && !say(changes)) return;
  const filled = changes.length - 1;
  moveTo(step);
  announce(`First error at step ${step + 1}. ${filled > 0 ? `${filled} earlier steps marked good.` : ""}`, true);
}

const ratingOf = (score) => (score < 1 / 3 ? "bad" : score > 2 / 3 ? "good" : "neutral");

function accept(step) {
  const said = item.prelabels[step];
  if (said) rate(step, ratingOf(said.score), "accepted");
  else announce(`There is no pre-label on step ${step + 1}.`, true);
}

function acceptRun() {
  const changes = [];
  let k = cursor;
  for (; k < item.steps.length; k++) {
    if (rating(k)) continue;
    if (!item.prelabels[k] || item.prelabels[k].score < SURE) break;
    changes.push({step: k, op: "rating", value: {rating: "good", how: "bulk"}});
  }
  if (!changes.length) return announce("No run of sure pre-labels from here: this step is yours to judge.", true);
  if (!say(changes)) return;
  moveTo(k);
  announce(`${changes.length} sure pre-labels accepted.`, true);
}

function toggleError(step, type) {
  const named = get(step, "errors") || [];
  const next = named.includes(type) ? named.filter((name) => name !== type) : [...named, type];
  say([{step, op: "errors", value: next.length ? next : null}]);
}

function toggle(step, op, value) {
  say([{step, op, value: get(step, op) === value ? null : value}]);
}

function moveTo(step, {scroll = true} = {}) {
  const count = item.steps.length;
  if (!count) return;
  keepComment();
  rows[cursor]?.classList.remove("current");
  rows[cursor]?.removeAttribute("aria-current");
  spots[cursor]?.removeAttribute("aria-current");
  cursor = Math.max(0, Math.min(count - 1, step));
  rows[cursor].classList.add("current");
  rows[cursor].setAttribute("aria-current", "step");
  spots[cursor].setAttribute("aria-current", "step");
  paintPanel();
  if (scroll) requestAnimationFrame(() => {  // in the frame, where the layout is made anyway
    rows[cursor]?.scrollIntoView({block: "nearest"});
    spots[cursor]?.scrollIntoView({block: "nearest"});
  });
}

async function submit() {
  const labelled = item.steps.some((_, k) => rating(k));
  if (!labelled && item.steps.length && !emptySubmit) {
    emptySubmit = true;
    return announce("No step is rated. Press n again to submit it so, or s to skip.", true);
  }
  keepComment();
  if (get(null, "submit") === true || say([{step: null, op: "submit", value: true}])) await next({leave: item.id});
}

async function skip() {
  keepComment();
  if (say([{step: null, op: "skip", value: true}])) await next({leave: item.id});
}

async function previous() {
  const items = await ownItems();
  if (!items) return;
  const at = items.findIndex((row) => row.id === item?.id);
  const row = at < 0 ? items[items.length - 1] : items[at - 1];
  if (row) await next({id: row.id});
  else announce("There is no item before this one.", true);
}

async function myItems() {
  const items = await ownItems();
  if (!items) return;
  const list = el("ul", {class: "items"}, ...items.reverse().map((row) => el("li", {},
    el("button", {type: "button", onclick: () => { $("dialog").close(); next({id: row.id}); }},
      `${row.task.trim().slice(0, 80) || row.id}`),
    ` ${row.status}, ${row.labels} rated`)));
  openDialog("My items", items.length ? list : el("p", {}, "None yet."));
}

function goTo() {
  const input = el("input", {type: "text", inputmode: "numeric", id: "goto", autocomplete: "off", size: "5"});
  const go = (then) => {
    const step = parseInt(input.value, 10) - 1;
    $("dialog").close();
    if (!(step >= 0 && step < item.steps.length)) return announce(`There is no step ${input.value}.`, true);
    moveTo(step);
    then?.(step);
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); go(); }
    else if (keyOf(event) === "x") { event.preventDefault(); go(firstError); }
    event.stopPropagation();
  });
  openDialog("Go to step", el("p", {}, el("label", {for: "goto"}, `Number, 1 to ${item.steps.length} `), input,
    el("button", {type: "button", onclick: () => go()}, "Go"),
    el("button", {type: "button", onclick: () => go(firstError)}, "First error there (x)")));
  input.focus();
}

function openDialog(title, ...content) {
  const close = el("button", {type: "button", class: "close", onclick: () => $("dialog").close()}, "Close", el("kbd", {}, "Esc"));
  $("dialog").replaceChildren(close, el("h2", {id: "dialog-title"}, title), ...content);
  $("dialog").showModal();
}

// --- the item ---------------------------------------------------------------------------------------------------------

/** Open an item: the one named by `id`, else the next that the server hands out. Waits until the server is there. */
async function next({id, leave} = {}) {
  clearTimeout(retry);
  let answer;
  try {
    if (!await outbox.send()) throw Object.assign(new Error("the server does not answer"), {status: 0});
    answer = await ask("/api/next", {annotator: me.name, id, leave});
  } catch (error) {
    if (error.status === 401) return signedOut();
    if (error.status === 409) return otherPerson(error);
    alertOnce("next", `The next item cannot be fetched now: ${error.message}. What you did is kept; trying again.`);
    retry = setTimeout(() => next({id, leave}), 1000);
    return;
  }
  clearAlert("next");
  paintProgress(answer.progress);
  emptySubmit = false;
  item = answer.item;
  history.replaceState(null, "", item ? "#" + item.id : location.pathname);
  if (!item) return paintDone();
  const known = new Set(item.history.map((event) => event.id));
  const events = item.history;
  item.history = [];
  values = new Map();
  events.forEach(apply);
  for (const [, event] of outbox.waiting()) if (event.trajectory_id === item.id && !known.has(event.id)) apply(event);
  paintItem();
}

function paintItem() {
  const blank = el("p", {class: "hint"}, "This trajectory has no steps.");
  tails = [];
  rows = item.steps.map((step, k) => {
    const said = item.prelabels[k];
    const extra = [];
    if (item.asked.includes(k)) extra.push(el("span", {class: "badge"}, "asked for"));
    if (said) {
      const shown = `model: ${ratingOf(said.score)} ${Math.round(said.score * 100)}%`;
      extra.push(el("span", {class: "badge prelabel " + scoreClass(said.score), title: said.source}, shown));
    }
    const tail = TAIL.cloneNode(true);  // cheaper than building it 400 times
    const buttons = tail.querySelector(".rate");
    buttons.setAttribute("aria-label", `Rate step ${k + 1}`);
    for (const button of buttons.children) button.setAttribute("aria-label", `Step ${k + 1} ${button.dataset.rating}`);
    tails.push({how: tail.querySelector(".how"), buttons: [...buttons.children]});
    return drawStep(step, k, {last: k + 1 === item.steps.length, extra: [...extra, tail]});
  });
  const task = textBox(item.task, {kind: "task", label: "Task"});
  $("main").replaceChildren(el("section", {class: "task", "aria-labelledby": "task-title"},
    el("h2", {id: "task-title"}, "Task"), task), rows.length ? el("ol", {class: "steps"}, ...rows) : blank);
  spots = item.steps.map((_, k) => el("button", {type: "button", class: "spot", "data-go": k}, String(k + 1)));
  $("minimap").replaceChildren(el("h2", {}, "Steps"), el("div", {class: "spots"}, ...spots));
  cursor = 0;
  $("panel").replaceChildren();
  paintSteps(item.steps.map((_, k) => k));
  const start = item.steps.findIndex((_, k) => !rating(k));
  $("main").scrollTop = 0;
  moveTo(start < 0 ? 0 : start, {scroll: start > 0});
  paintKeys();
}

function paintSteps(steps) {
  for (const k of steps) {
    const value = rating(k), row = rows[k], spot = spots[k];
    row.dataset.rating = value || "none";
    spot.dataset.mark = value || "none";
    const marks = [value ? `, ${value}` : ", not rated"];
    if (get(k, "flag")) marks.push(", flagged");
    if (get(k, "comment")) marks.push(", comment");
    spot.setAttribute("aria-label", `Step ${k + 1}${marks.join("")}`);
    spot.textContent = `${k + 1}${value ? " " + GLYPH[value] : ""}${get(k, "flag") ? " ⚑" : ""}`;
    const {how: label, buttons} = tails[k];
    for (const button of buttons) {
      const pressed = String(button.dataset.rating === value);
      if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
    }
    const how = value ? get(k, "rating").how : "";
    label.textContent = {accepted: "accepted", bulk: "accepted in a run",
      first_error_fill: "before the first error", import: "imported"}[how] || "";
  }
}

function repaint(steps) {
  const own = [...new Set(steps)].filter((step) => step !== null && step < item.steps.length);
  paintSteps(own);
  if (own.includes(cursor)) paintPanel();
  paintKeys();
}

function paintPanel() {
  const step = cursor, value = rating(step);
  let panel = $("panel").querySelector(".controls");
  if (!panel) $("panel").replaceChildren(panel = buildPanel());
  panel.querySelector("h2").textContent = `Step ${step + 1} of ${item.steps.length}`;
  for (const button of panel.querySelectorAll("button")) {
    const {rating: own, confidence, error} = button.dataset;
    const pressed = own ? own === value : confidence ? confidence === get(step, "confidence")
      : error ? (get(step, "errors") || []).includes(error) : get(step, "flag") === true;
    button.setAttribute("aria-pressed", String(pressed));
  }
  const box = panel.querySelector("textarea");
  box.dataset.step = step;
  if (document.activeElement !== box) box.value = get(step, "comment") || "";
}

function buildPanel() {
  const key = (name) => el("kbd", {}, name);
  const group = (title, ...buttons) => el("fieldset", {}, el("legend", {}, title), ...buttons);
  const comment = el("textarea", {id: "comment", rows: "3", maxlength: "20000"});
  let idle;
  comment.addEventListener("input", () => { clearTimeout(idle); idle = setTimeout(keepComment, 800); });
  comment.addEventListener("blur", keepComment);
  return el("div", {class: "controls"}, el("h2", {}, ""),
    group("How good is it?", ...[3, 2, 1].map((k) => el("button",
      {type: "button", class: "big", "data-rating": RATINGS[k]}, GLYPH[RATINGS[k]] + " " + RATINGS[k], key(k)))),
    group("How sure are you?", ...Object.entries(CONFIDENCES).map(([k, name]) => el("button",
      {type: "button", "data-confidence": name}, name, key(k)))),
    group("What is wrong?", ...me.error_types.map((name, i) => el("button",
      {type: "button", "data-error": name}, name, key("⇧" + (i + 1))))),
    el("p", {}, el("label", {for: "comment"}, "Comment "), key("c"), comment),
    el("p", {}, el("button", {type: "button", "data-flag": "1"}, "⚑ Flag", key("f"))));
}

function keepComment() {
  const box = $("panel").querySelector("textarea");
  if (!box || !item) return;
  const step = Number(box.dataset.step), text = box.value;
  if (text !== (get(step, "comment") || "")) say([{step, op: "comment", value: text || null}]);
}

function paintKeys() {
  if (!$("keys").childElementCount) {
    const actions = [["First error here", "x", () => firstError(cursor)], ["Accept", "Space", () => accept(cursor)],
      ["Accept sure run", "a", acceptRun], ["Undo", "u", undo], ["Redo", "⇧U", redo], ["Fold / open", "o", fold],
      ["Raw text", "r", raw], ["Go to", "g", goTo], ["Skip", "s", skip], ["Item before", "p", previous],
      ["My items", "m", myItems], ["Submit, next", "n", submit]];
    for (const [name, key, call] of actions) {
      const primary = key === "n" ? "primary" : "";
      $("keys").append(el("button", {type: "button", class: primary, onclick: () => item && call()}, name, el("kbd", {}, key)));
    }
  }
  const {undo: back, redo: forth} = item ? stacks(item.history) : {undo: [], redo: []};
  const [accepts, run] = [...$("keys").children].slice(1, 3);
  accepts.hidden = run.hidden = !item?.prelabels.some(Boolean);
  $("keys").children[3].disabled = !back.length;
  $("keys").children[4].disabled = !forth.length;
}

function paintProgress(progress) {
  if (progress) $("progress").textContent = `${progress.submitted} of ${progress.total} submitted`;
}

function paintDone() {
  rows = []; spots = [];
  $("minimap").replaceChildren();
  $("panel").replaceChildren();
  paintKeys();
  $("main").replaceChildren(el("section", {class: "done"}, el("h2", {}, "Nothing is left for you now"),
    el("p", {}, "Every item is submitted, skipped, or open with somebody else. "),
    el("button", {type: "button", onclick: () => next()}, "Look again"),
    el("button", {type: "button", onclick: myItems}, "My items"),
    el("a", {class: "button", href: "/api/export", download: "labels.jsonl"}, "Export my labels")));
}

const fold = () => rows[cursor]?.fold();
const raw = () => rows[cursor]?.raw();

// --- messages ---------------------------------------------------------------------------------------------------------

function signedOut() {
  alertOnce("signed-out", "You are signed out. Labels that wait are kept in this browser. ", el("a", {href: "/login"}, "Sign in"));
}

const otherPerson = (error) => alertOnce("away", `${error.message}. `, el("a", {href: "/"}, "Reload"));

/** My items from the server, oldest first; null, and a message, where it does not answer. */
async function ownItems() {
  try { return await ask("/api/items"); } catch (error) {
    announce(`Your items cannot be listed now: ${error.message}.`, true);
    return null;
  }
}

function onOutbox({waiting, error, refused}) {
  const saved = $("saved");
  saved.dataset.state = error ? "away" : waiting ? "sending" : "saved";
  saved.textContent = error ? `${waiting} waiting` : waiting ? "saving…" : "saved";
  if (refused) alertOnce("refused", `The server refused a label for good: ${refused}`);
  if (!error) { clearAlert("away"); return; }
  if (error.status === 401) signedOut();
  else if (error.status === 409) otherPerson(error);
  else if (error.status) alertOnce("away", `Not saved on the server: ${error.message}. Labels are kept here and sent again.`);
  else alertOnce("away", "The server does not answer. Labels are kept in this browser and sent when it is back.");
}

// --- input ------------------------------------------------------------------------------------------------------------

function onKey(event) {
  if ($("dialog").open || event.isComposing) return;
  const typing = event.target.closest?.("input, textarea, select");
  if (typing) {
    if (event.key === "Escape") typing.blur();
    return;
  }
  if ((event.ctrlKey || event.metaKey) && !event.altKey && event.code === "KeyZ") {
    event.preventDefault();
    return item && (event.shiftKey ? redo() : undo());
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const key = keyOf(event);
  if (key === "?") return showHelp(openDialog, me);
  if (key === "h") return toggleGuide();
  if (!item) { if (key === "p") previous(); if (key === "m") myItems(); if (key === "n") next(); return; }
  const moves = {j: 1, arrowdown: 1, k: -1, arrowup: -1};
  if (key in moves) { event.preventDefault(); return moveTo(cursor + moves[key]); }
  if (event.repeat) return;
  if (key === " " || key === "enter") {
    if (event.target.closest("button, a, summary")) return;  // the focused control takes it
    if (key === " ") { event.preventDefault(); accept(cursor); }
    return;
  }
  const shifted = event.shiftKey && /^Digit[1-9]$/.test(event.code) ? me.error_types[Number(event.code[5]) - 1] : null;
  if (shifted) return toggleError(cursor, shifted);
  const act = {x: () => firstError(cursor), a: acceptRun, u: event.shiftKey ? redo : undo, y: redo, n: submit, s: skip, g: goTo,
    o: fold, r: raw, p: previous, m: myItems, f: () => toggle(cursor, "flag", true), home: () => moveTo(0),
    end: () => moveTo(item.steps.length - 1), c: () => $("panel").querySelector("textarea").focus()}[key];
  if (RATINGS[key]) rate(cursor, RATINGS[key]);
  else if (CONFIDENCES[key]) toggle(cursor, "confidence", CONFIDENCES[key]);
  else if (act) act();
  else return;
  event.preventDefault();
}

function onClick(event) {
  const button = event.target.closest("button");
  const row = event.target.closest(".step");
  if (button && event.detail) button.blur();  // a click leaves the keys with the page
  if (!item || $("dialog").contains(event.target)) return;
  const step = row ? Number(row.dataset.step) : cursor;
  const {rating: value, confidence, error, flag, go} = button?.dataset || {};
  if (go !== undefined) moveTo(Number(go));
  else if (row && !value) moveTo(step, {scroll: false});
  if (value) { if (rating(step) === value) { say([{step, op: "rating", value: null}]); announce(`Step ${step + 1} cleared.`); } else rate(step, value); }
  else if (confidence) toggle(cursor, "confidence", confidence);
  else if (error) toggleError(cursor, error);
  else if (flag) toggle(cursor, "flag", true);
}

function toggleGuide() {
  const open = $("panel").querySelector(".guide");
  if (open) return open.remove();
  const close = el("button", {type: "button", class: "quiet", onclick: toggleGuide}, "Close", el("kbd", {}, "h"));
  const pane = el("section", {class: "guide", "aria-label": "Guideline"}, el("h2", {}, "Guideline "), close,
    textBox(me.guide, {kind: "guide", label: "Guideline"}));
  $("panel").append(pane);
  pane.scrollIntoView({block: "nearest"});
}

async function start() {
  for (;;) {
    try { me = await ask("/api/me"); break; } catch (error) {
      if (error.status === 401) { location.href = "/login"; return; }
      alertOnce("next", `${error.message}; trying again.`);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  clearAlert("next");
  const links = me.role === "reviewer" ? [el("a", {href: "/adjudicate"}, "Adjudicate"), el("a", {href: "/agreement"}, "Agreement")] : [];
  const out = me.local ? [] : [el("button", {type: "button", class: "quiet", onclick: async () => {
    await ask("/api/logout", {});
    location.href = "/login";
  }}, "Sign out")];
  $("top").append(el("h1", {}, "prm annotate"), el("span", {id: "hint", class: "hint"}), el("span", {class: "spring"}),
    el("span", {id: "progress"}), el("span", {id: "saved", "data-state": "saved"}, "saved"), el("nav", {"aria-label": "Pages"}, ...links),
    el("span", {class: "who"}, me.name), ...out,
    el("button", {type: "button", class: "quiet", onclick: () => toggleGuide()}, "Guideline", el("kbd", {}, "h")),
    el("button", {type: "button", class: "quiet", onclick: () => showHelp(openDialog, me)}, "Keys", el("kbd", {}, "?")), themeButton());
  outbox = new Outbox(me.project, me.name, onOutbox);
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", onClick);
  addEventListener("pagehide", keepComment);
  if (channel) channel.onmessage = ({data}) => {  // the same person in another tab
    if (data.project !== me.project || data.annotator !== me.name || data.item !== item?.id) return;
    data.events.forEach(apply);
    repaint(data.events.map((event) => event.step));
  };
  setInterval(() => { if (item && !document.hidden) ask(`/api/lease/${encodeURIComponent(item.id)}`, {}).catch(() => {}); }, 60000);
  await next({id: decodeURIComponent(location.hash.slice(1)) || undefined});
}

start();
