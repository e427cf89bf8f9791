// Reading trajectories and labels: the view of the labelling page without anything to press but moving about.

import {ask, drawStep, el, scoreClass, textBox, themeButton} from "./view.js";
import {keyOf} from "./keys.js";

const $ = (id) => document.getElementById(id);
let about, at = 0, source = "", rows = [], cursor = 0;

const scoreOf = (labels) => {
  const own = source ? labels.filter((label) => label.source === source) : labels;
  return own.length ? own.reduce((sum, label) => sum + label.score, 0) / own.length : null;
};

async function open(index) {
  at = Math.max(0, Math.min(about.count - 1, index));
  const item = await ask("/api/item/" + at);
  history.replaceState(null, "", "#" + (at + 1));
  $("number").value = String(at + 1);
  rows = item.steps.map((step, k) => {
    const labels = item.labels[k], score = scoreOf(labels);
    const chips = el("span", {class: "scores"}, ...labels.map((label) => el("span",
      {class: "score " + scoreClass(label.score), title: label.note || null}, `${label.source} ${label.score.toFixed(2)}`)));
    const row = drawStep(step, k, {last: k + 1 === item.steps.length, extra: [el("span", {class: "spring"}), chips]});
    if (score !== null) row.classList.add(scoreClass(score));
    for (const label of labels.filter((one) => one.note)) row.append(el("p", {class: "caption"}, `${label.source}: ${label.note}`));
    return row;
  });
  const outcome = item.outcome === null ? "outcome unknown" : `outcome ${item.outcome}`;
  $("main").replaceChildren(
    el("section", {class: "task", "aria-labelledby": "task-title"},
      el("h2", {id: "task-title"}, "Task"), textBox(item.task, {kind: "plain", label: "Task"}),
      el("p", {class: "caption"}, `${item.id} · ${item.steps.length} steps · ${outcome}`),
      el("details", {}, el("summary", {}, "Meta"), textBox(JSON.stringify(item.meta, null, 1), {label: "Meta"}))),
    el("ol", {class: "steps"}, ...rows));
  cursor = -1;
  scrollTo(0, 0);
}

function moveTo(step) {
  rows[cursor]?.classList.remove("current");
  cursor = Math.max(0, Math.min(rows.length - 1, step));
  rows[cursor]?.classList.add("current");
  rows[cursor]?.scrollIntoView({block: "nearest"});
}

async function table(from) {
  const labels = await ask("/api/labels?from=" + from);
  const body = labels.map((label) => el("tr", {}, el("td", {}, label.trajectory_id), el("td", {class: "number"}, String(label.step + 1)),
    el("td", {class: "number"}, el("span", {class: "score " + scoreClass(label.score)}, label.score.toFixed(3))),
    el("td", {}, label.source), el("td", {}, label.note)));
  const heads = ["Trajectory", "Step", "Score", "Source", "Note"].map((name) => el("th", {scope: "col"}, name));
  const last = from + labels.length;
  $("main").replaceChildren(el("h2", {class: "visually-hidden"}, "Labels"),
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body)),
    el("p", {}, el("button", {type: "button", disabled: from === 0, onclick: () => table(Math.max(0, from - 200))}, "Before"),
      ` ${from + 1} to ${last} of ${about.labels} `,
      el("button", {type: "button", disabled: last >= about.labels, onclick: () => table(last)}, "After")));
  scrollTo(0, 0);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea")) return;
  const key = keyOf(event);
  const act = {n: () => open(at + 1), p: () => open(at - 1), j: () => moveTo(cursor + 1), k: () => moveTo(cursor - 1),
    arrowdown: () => moveTo(cursor + 1), arrowup: () => moveTo(cursor - 1), o: () => rows[cursor]?.fold(),
    r: () => rows[cursor]?.raw()}[key];
  if (act && about.count) { act(); event.preventDefault(); }
}

async function start() {
  about = await ask("/api/about");
  $("top").append(el("h1", {}, about.name), el("span", {class: "spring"}));
  if (about.count) {
    const number = el("input", {id: "number", type: "number", min: "1", max: String(about.count), size: "6"});
    number.addEventListener("change", () => open(Number(number.value) - 1));
    $("top").append(el("label", {for: "number"}, "Trajectory "), number, el("span", {}, `of ${about.count}`),
      el("button", {type: "button", onclick: () => open(at - 1)}, "Before", el("kbd", {}, "p")),
      el("button", {type: "button", onclick: () => open(at + 1)}, "Next", el("kbd", {}, "n")));
    if (about.sources.length > 1) {
      const select = el("select", {id: "source"}, el("option", {value: ""}, "mean of all"), ...about.sources.map((name) => el("option", {value: name}, name)));
      select.addEventListener("change", () => { source = select.value; open(at); });
      $("top").append(el("label", {for: "source"}, "Colour by "), select);
    }
  }
  $("top").append(themeButton());
  for (const line of about.notes) $("top").after(el("p", {class: "hint"}, line));
  document.addEventListener("keydown", onKey);
  if (about.count) await open(Number(location.hash.slice(1)) - 1 || 0);
  else await table(0);
}

start().catch((error) => $("main").replaceChildren(el("p", {}, error.message)));
