// Which key was pressed, on any layout, and the help overlay.

import {el} from "./view.js";

const NAMED = ["arrowdown", "arrowup", "home", "end", "enter", "escape"];

/** A lower-case name: a Latin letter, "1" to "3" by place (also without the numeric row's shift), " ", "?", "arrowup". */
export function keyOf(event) {
  const key = event.key.toLowerCase();
  if (NAMED.includes(key) || key === "?" || key === " ") return key;
  const digit = /^(?:Digit|Numpad)(\d)$/.exec(event.code);
  if (digit && !(event.shiftKey && event.code.startsWith("Digit"))) return digit[1];
  if (/^[a-z0-9]$/.test(key)) return event.shiftKey && digit ? "" : key;
  const letter = /^Key([A-Z])$/.exec(event.code);
  return letter ? letter[1].toLowerCase() : "";
}

const GROUPS = [
  ["Rate the current step", [["3  2  1", "good, neutral, bad; the next step becomes current"],
    ["x", "the first error is here: bad, and earlier unrated steps good"], ["Space", "accept the model's pre-label"],
    ["a", "accept the run of sure pre-labels from here (P(good) at least 0.8, never a bad one)"]]],
  ["Say more about it", [["q  w  e", "confidence low, medium, high"], ["⇧1 … ⇧9", "error types"], ["c", "comment; Esc leaves it"],
    ["f", "flag"]]],
  ["Move", [["j  k  ↓  ↑", "next and previous step"], ["g", "go to a step by number; Enter goes, x marks the first error there"],
    ["Home  End", "first and last step"], ["o", "fold or open long texts"], ["r", "raw text"]]],
  ["The item", [["n", "submit, open the next"], ["s", "skip"], ["p", "the item before"], ["m", "my items"],
    ["u  ⇧U", "undo, redo; also Ctrl+Z, Ctrl+Shift+Z, y"]]],
  ["This page", [["h", "guideline"], ["?", "these keys"]]],
];

export function showHelp(openDialog, me) {
  const rows = GROUPS.map(([title, keys]) => [el("h3", {}, title), el("dl", {class: "help"},
    ...keys.flatMap(([key, what]) => [el("dt", {}, ...key.split("  ").map((name) => el("kbd", {}, name))), el("dd", {}, what)]))]);
  const types = el("p", {class: "hint"}, "Error types: " + me.error_types.map((name, i) => `⇧${i + 1} ${name}`).join(", "));
  openDialog("Keys", ...rows.flat(), types);
}
