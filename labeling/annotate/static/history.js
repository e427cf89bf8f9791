// Undo and redo, from the events of one item alone: so they have no limit and outlive a reload.

export const keyFor = (step, op) => `${step ?? ""}/${op}`;

/** The groups (of one key press each) that can be undone and redone, oldest first. */
export function stacks(history) {
  let undo = [], redo = [], last = "";
  for (const event of history) {
    if (!event.group || event.group === last) continue;
    last = event.group;
    const others = (list) => list.filter((group) => group !== event.of);
    if (event.kind === "undo") { undo = others(undo); redo.push(event.of); }
    else if (event.kind === "redo") { redo = others(redo); undo.push(event.of); }
    else { undo.push(event.group); redo = []; }
  }
  return {undo, redo};
}

/** The last event of each field that a group touched. */
function touched(history, group) {
  const fields = new Map();
  for (const event of history) if (event.group === group) fields.set(keyFor(event.step, event.op), event);
  return fields;
}

/** The changes that bring a group's fields back to what they were before it. */
export function undoing(history, group) {
  const first = history.findIndex((event) => event.group === group);
  return [...touched(history, group)].map(([key, {step, op}]) => {
    let value = null;
    for (let i = 0; i < first; i++) if (keyFor(history[i].step, history[i].op) === key) value = history[i].value;
    return {step, op, value};
  });
}

/** The changes that set a group's fields again as it had set them. */
export function redoing(history, group) {
  return [...touched(history, group).values()].map(({step, op, value}) => ({step, op, value}));
}
