// Draws trajectories. Every text of an agent becomes text nodes: nothing is parsed as HTML, nothing is left out, and the
// text content of a drawn part equals the text that it was drawn from, character by character.

const FOLD_CHARACTERS = 3000, FOLD_LINES = 24, PRETTY_LIMIT = 50000;

/** An element with properties, `data` and `aria-` attributes, and children (elements or texts). */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// --- characters that cannot be seen ----------------------------------------------------------------------------------

const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}\u115f\u1160\u3164\uffa0]/u;
const HIDDEN_RUN = new RegExp(`((?![\\n\\t])${HIDDEN.source})\\1*`, "gu");
const NAMES = {0x00: "NUL", 0x07: "BEL", 0x08: "BS", 0x0d: "CR", 0x1b: "ESC", 0x7f: "DEL", 0xad: "SHY", 0x200b: "ZWSP",
  0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF",
  0x202d: "LRO", 0x202e: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM"};

function nameOf(character) {
  const code = character.codePointAt(0);
  return NAMES[code] || "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

/** Append a text; a character that cannot be seen, or that turns the direction, stands in a labelled box. */
export function appendText(parent, text) {
  let from = 0;
  if (HIDDEN.test(text)) {
    for (const match of text.matchAll(HIDDEN_RUN)) {
      const at = match.index;
      const joins = match[0] === "\u200d" && /\p{Extended_Pictographic}\ufe0f?$/u.test(text.slice(Math.max(0, at - 3), at)) &&
        /^\p{Extended_Pictographic}/u.test(text.slice(at + 1, at + 3));
      if (joins) continue; // inside an emoji
      if (match.index > from) parent.append(text.slice(from, match.index));
      const times = match[0].length / match[1].length;
      const name = nameOf(match[1]) + (times > 1 ? `×${times}` : "");
      parent.append(el("span", {class: "hidden-character", "data-name": name, title: name}, el("span", {}, match[0])));
      from = match.index + match[0].length;
    }
  }
  if (from < text.length) parent.append(text.slice(from));
  return parent;
}

// --- the parts of an action -------------------------------------------------------------------------------------------

const BLOCKS = /<(think|thinking|reasoning|tool_call|function_call|tool_code|answer|final_answer)>/g;
const LINES = /^(Thought|Action Input|Action|Final Answer|Answer|Observation)(?: ?\d+)?:/gm;
const KIND = {think: "thought", thinking: "thought", reasoning: "thought", tool_call: "tool", function_call: "tool",
  tool_code: "tool", answer: "answer", final_answer: "answer", "Thought": "thought", "Action Input": "tool",
  "Action": "tool", "Final Answer": "answer", "Answer": "answer", "Observation": "text"};

/** [{kind, text}] whose texts joined are the text: thought, tool, answer, text, and mark (a tag or a line's name). */
export function parts(text) {
  const found = [];
  const push = (kind, piece) => { if (piece) found.push({kind, text: piece}); };
  const lines = (piece) => {
    const starts = [...piece.matchAll(LINES)];
    if (!starts.length) return push(isCall(piece) ? "tool" : "text", piece);
    push("text", piece.slice(0, starts[0].index));
    starts.forEach((start, i) => {
      const end = i + 1 < starts.length ? starts[i + 1].index : piece.length;
      push("mark", start[0]);
      push(KIND[start[1]], piece.slice(start.index + start[0].length, end));
    });
  };
  let from = 0;
  for (const open of text.matchAll(BLOCKS)) {
    if (open.index < from) continue;
    lines(text.slice(from, open.index));
    const inside = open.index + open[0].length, close = `</${open[1]}>`, end = text.indexOf(close, inside);
    push("mark", open[0]);
    push(KIND[open[1]], text.slice(inside, end < 0 ? text.length : end));
    if (end >= 0) push("mark", close);
    from = end < 0 ? text.length : end + close.length;
  }
  lines(text.slice(from));
  return found;
}

function isCall(text) {
  const trimmed = text.trim();
  return (trimmed.startsWith("{") || trimmed.startsWith("[")) && parses(trimmed);
}

function parses(text) {
  try { JSON.parse(text); return true; } catch { return false; }
}

/** What a step mainly is, for the list of steps. */
export function roleOf(step, last) {
  const kinds = new Set(parts(step.action.slice(0, 20000)).map((part) => part.kind));
  for (const kind of ["tool", "answer", "thought"]) if (kinds.has(kind)) return kind;
  return last && !step.observation ? "answer" : "text";
}

const TOKENS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|\s+|[^\s"{}[\],:]+/g;

/** JSON laid out in lines and colours by elements alone: no character is added or left out. `rest` follows it. */
function appendJson(parent, text, rest) {
  let depth = 0, line = null, fresh = true;
  const tokens = text.match(TOKENS) || [];
  const blank = (token) => /^\s/.test(token);
  const after = (i) => { while (blank(tokens[i] || "")) i++; return tokens[i] || ""; };
  let before = "";
  tokens.forEach((token, i) => {
    const opens = token === "{" || token === "[", closes = token === "}" || token === "]";
    if (closes && before !== "{" && before !== "[") { depth -= 1; fresh = true; }
    if (fresh && !blank(token)) {
      line = el("span", {class: "json-line"});
      line.style.paddingLeft = `${depth * 1.3}em`;
      parent.append(line);
      fresh = false;
    }
    const next = after(i + 1);
    const kind = token[0] === '"' ? (next === ":" ? "key" : "string") : /^[-\d]/.test(token) ? "number" : "";
    if (kind) line.append(appendText(el("span", {class: "json-" + kind}), token));
    else appendText(line, token);
    if (opens && next !== "}" && next !== "]") { depth += 1; fresh = true; }
    else if (token === ",") fresh = true;
    if (!blank(token)) before = token;
  });
  appendText(line, rest);
}

function appendPart(parent, {kind, text}) {
  const made = el("span", {class: "part-" + kind});
  const body = text.trim();
  const json = kind === "tool" && body.length < PRETTY_LIMIT && !body.includes("\n") && "{[".includes(body[0] || " ");
  if (json && parses(body)) {
    const start = text.indexOf(body);
    appendText(made, text.slice(0, start));
    appendJson(made, body, text.slice(start + body.length));
  } else appendText(made, text);
  parent.append(made);
}

// --- steps ------------------------------------------------------------------------------------------------------------

function isLong(text) {
  if (text.length > FOLD_CHARACTERS) return true;
  let lines = 0;
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) if (++lines > FOLD_LINES) return true;
  return false;
}

function beginning(text) {
  const cut = text.split("\n", FOLD_LINES).join("\n").slice(0, FOLD_CHARACTERS);
  return /[\ud800-\udbff]$/.test(cut) ? cut.slice(0, -1) : cut;
}

const THOUSANDS = new Intl.NumberFormat("en");
const count = (text) => (text.length < 1000 ? String(text.length) : THOUSANDS.format(text.length));

const SCROLLS = new Set(["task"]); // of limited height: the keyboard must reach it to scroll

/** A text in its box. A long one shows its beginning, says so, and opens whole by one click. */
export function textBox(text, {kind = "plain", label}) {
  const box = el("pre", {class: "text " + kind, tabindex: SCROLLS.has(kind) ? "0" : null, role: "group", "aria-label": label, dir: "auto"});
  const whole = el("div", {class: "box"}, box);
  let folded = isLong(text), raw = false;
  const draw = () => {
    const shown = folded ? beginning(text) : text;
    box.replaceChildren();
    box.classList.toggle("folded", folded);
    if (kind === "action" && !raw) for (const part of parts(shown)) appendPart(box, part);
    else if (kind === "observation") appendPart(box, {kind: isCall(shown) ? "tool" : "text", text: shown});
    else appendText(box, shown);
    if (button) {
      button.textContent = folded ? `Show all ${count(text)} characters` : "Fold";
      button.setAttribute("aria-expanded", String(!folded));
    }
  };
  let button = null;
  if (folded) {
    button = el("button", {type: "button", class: "fold", onclick: () => whole.fold()});
    whole.append(button);
  }
  whole.fold = () => { if (button) { folded = !folded; draw(); } };
  whole.raw = () => { raw = !raw; draw(); };
  draw();
  return whole;
}

/**
 * One step as a list item: number, role, the action, the observation.
 * `extra` (elements) stand in its head. The item has `fold()` and `raw()`.
 */
export function drawStep(step, index, {last = false, extra = []} = {}) {
  const number = index + 1;
  const action = textBox(step.action, {kind: "action", label: `Step ${number}: what the agent wrote`});
  const role = roleOf(step, last);
  const item = el("li", {class: "step", "data-step": index},
    el("div", {class: "step-head"}, el("h3", {}, `Step ${number}`), el("span", {class: "role role-" + role}, ROLE[role]),
      ...extra),
    action);
  const boxes = [action];
  if (step.observation) {
    const label = `Step ${number}: observation`;
    const seen = textBox(step.observation, {kind: "observation", label});
    item.append(el("p", {class: "caption"}, `Observation · ${count(step.observation)} characters`), seen);
    boxes.push(seen);
  }
  item.fold = () => boxes.forEach((box) => box.fold());
  item.raw = () => action.raw();
  return item;
}

export const ROLE = {thought: "thought", tool: "tool call", answer: "answer", text: "message"};

/** From red (0) by amber to green (1): a class of style.css, one of eleven. */
export const scoreClass = (score) => `score-${Math.round(score * 10)}`;

/** The theme: the system's, or the one that was chosen here. */
export function themeButton() {
  const root = document.documentElement;
  const set = (theme) => { if (theme) root.dataset.theme = theme; else delete root.dataset.theme; };
  try { set(localStorage.getItem("prm-theme")); } catch { /* storage is off: the system's theme */ }
  return el("button", {type: "button", class: "quiet", "aria-label": "Change between light and dark", onclick: () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    set(dark ? "light" : "dark");
    try { localStorage.setItem("prm-theme", root.dataset.theme); } catch { /* it holds for this page */ }
  }}, "◐");
}

/** Ask the server. Resolves to its JSON; rejects with an Error that has `status` (0: no answer). */
export async function ask(path, body) {
  let answer;
  try {
    answer = await fetch(path, body === undefined ? {} : {
      method: "POST", headers: {"content-type": "application/json", "x-prm": "1"}, body: JSON.stringify(body)});
  } catch {
    throw Object.assign(new Error("the server does not answer"), {status: 0});
  }
  const text = await answer.text();
  let found = {};
  try { found = JSON.parse(text); } catch { /* not JSON: the status says enough */ }
  if (!answer.ok) throw Object.assign(new Error(found.error || `the server answered ${answer.status}`), {status: answer.status});
  return found;
}
