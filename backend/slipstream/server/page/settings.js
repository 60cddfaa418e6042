// The settings panel: what it adds to a request, and what of it this browser remembers.

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "frequency_penalty", "max_tokens", "seed"];

/** Storage of the browser as it is allowed: a page in a private window may have none. */
export function remember(storage, name, value) {
  try {
    window[storage].setItem(name, value);
  } catch {
    // full or forbidden: it is then forgotten with the page
  }
}

export function recall(storage, name) {
  try {
    return window[storage].getItem(name) || "";
  } catch {
    return "";
  }
}

export function key() {
  return $("key").value.trim();
}

export function isKeeping() {
  return $("keep").checked;
}

/** Fields of the API for a model: those that are set, as a model has its own for the rest (generation_config.json). */
export function samplingFields(card) {
  const fields = {};
  for (const name of NUMBERS) {
    if ($(name).value !== "") fields[name] = Number($(name).value);
  }
  if (card.speculative_methods.length) fields.speculation = speculation();
  return fields;
}

function speculation() {
  if ($("method").value === "none") return { speculative_method: "none" };
  const asked = $("method").value ? { speculative_method: $("method").value } : {};
  if ($("drafts").value !== "") asked.num_draft_tokens = Number($("drafts").value);
  return asked;
}

/** Shows what a model offers. */
export function showModel(card) {
  const methods = card ? card.speculative_methods : [];
  $("speculation").hidden = !methods.length;
  const choices = [["", "the model's own"], ...methods.map((name) => [name, name]), ["none", "off"]];
  $("method").replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  const notes = [];
  if (card?.has_safety) notes.push("A safety model watches this model's answers and may withhold them.");
  if (card && !card.has_chat_template) notes.push("This model has no chat template: each message is a prompt of its own.");
  $("model-note").textContent = notes.join(" ");
  $("model-note").hidden = !notes.length;
}

function store() {
  const values = Object.fromEntries(NUMBERS.map((name) => [name, $(name).value]));
  remember("localStorage", "settings", JSON.stringify(values));
}

/** Fills the panel with what was set before. keyChanged: called when there is another key. */
export function startSettings(keyChanged) {
  let stored = {};
  try {
    stored = JSON.parse(recall("localStorage", "settings") || "{}");
  } catch {
    // another page of this host wrote it
  }
  for (const name of NUMBERS) {
    if (typeof stored[name] === "string") $(name).value = stored[name];
    $(name).addEventListener("change", store);
  }
  $("key").value = recall("sessionStorage", "key");
  $("key").addEventListener("change", () => {
    remember("sessionStorage", "key", $("key").value);
    keyChanged();
  });
  $("keep").checked = recall("localStorage", "keep") !== "no";
  $("keep").addEventListener("change", () => remember("localStorage", "keep", isKeeping() ? "yes" : "no"));
}
