// The chat page: one conversation at a time, streamed from /v1. Modules without a build step; nothing comes from elsewhere.

import { fetchModels, stream } from "./api.js";
import { clearFigures, showCache, showFigures, showSafety } from "./figures.js";
import { openHistory } from "./history.js";
import { loadLibraries } from "./markdown.js";
import { MessageList } from "./messages.js";
import { closePanels, startPanels } from "./panels.js";
import { isKeeping, key, recall, remember, samplingFields, showModel, startSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as talks from "./talk.js";

const $ = (id) => document.getElementById(id);
const KV_EVERY_MS = 2000;
const SAVE_EVERY_MS = 2000;
const RETRY_MS = 3000;
const KEPT = "Your message is kept.";
let models = [];
let talk = talks.newTalk();
let running = null; // {abort, ended} of the answer that is being made
let store = null; // the History of this browser, if it has one
let saving = Promise.resolve();
let sidebar = null;
let list = null;

// ---------------------------------------------------------------- one answer

/** Answers `messages`. If nothing comes of it, the conversation is as before and nothing() is called. */
async function attempt(messages, nothing) {
  const card = currentModel();
  const before = talk.messages;
  if (running || !card) {
    complain(`${running ? "Another answer is being made: stop it first." : "No model is ready."} ${KEPT}`);
    return nothing();
  }
  const answer = talks.newAnswer(card.id);
  const abort = new AbortController();
  let ended;
  running = { abort, ended: new Promise((resolve) => { ended = resolve; }) };
  Object.assign(talk, { messages, system: $("system").value, tools: $("tools").value });
  setBusy(true);
  const failure = await generate(card, answer, abort.signal);
  setBusy(false);
  if (failure && talks.isEmpty(answer)) {
    talk.messages = before;
    list.show(before);
    if (failure.name !== "AbortError") complain(`${failure.message} ${KEPT}`);
    nothing();
  } else if (failure && failure.name !== "AbortError") {
    complain(`${failure.message} What came of the answer is kept.`);
  }
  list.offerResults(talk.messages);
  await keep();
  running = null;
  ended();
}

/** Streams an answer behind the conversation's messages. Returns what ended it early, or null. */
async function generate(card, answer, signal) {
  const times = { started: performance.now(), first: 0 };
  let view = null;
  let usage = null;
  let saved = performance.now();
  let failure = null;
  try {
    const [path, body] = talks.toRequest(talk, card, samplingFields(card));
    talk.messages = [...talk.messages, answer];
    list.show(talk.messages);
    view = list.begin();
    keep();
    for await (const chunk of stream(path, body, key(), signal)) {
      if (talks.addChunk(answer, chunk)) times.first ||= performance.now();
      usage = chunk.usage || usage;
      if (chunk.safety) showSafety(chunk.safety);
      showFigures(times, usage);
      view.update();
      if (performance.now() - saved < SAVE_EVERY_MS) continue;
      saved = performance.now();
      keep();
    }
  } catch (error) {
    failure = error;
  }
  if (!failure && talks.isEmpty(answer)) answer.note = "an empty answer";
  if (failure && !talks.isEmpty(answer)) answer.note = failure.name === "AbortError" ? "stopped" : "incomplete";
  view?.end();
  const calls = answer.calls.map((call) => ` Calls ${call.name}.`).join("");
  $("said").textContent = talks.isEmpty(answer) ? "No answer" : `Answer: ${answer.content}${calls}`;
  return failure;
}

async function stop() {
  if (!running) return;
  running.abort.abort();
  await running.ended;
}

function send(text) {
  $("prompt").value = "";
  setDraft();
  return attempt([...talk.messages, talks.userMessage(text)], () => {
    $("prompt").value = [text, $("prompt").value].filter(Boolean).join("\n\n");
    setDraft();
    $("prompt").focus();
  }).then(() => $("prompt").focus());
}

const ACTIONS = {
  regenerate: () => attempt(talks.withoutLastAnswer(talk.messages), () => {}),
  edit: (message, text) => {
    const messages = talk.messages.slice(0, talk.messages.indexOf(message));
    return attempt([...messages, talks.userMessage(text)], () => list.edit(message, text));
  },
  results: async (texts) => {
    const results = talks.toolResults(talk.messages[talk.messages.length - 1].calls, texts);
    let isLost = false;
    await attempt([...talk.messages, ...results], () => { isLost = true; });
    if (isLost) list.offerResults(talk.messages, texts);
  },
};

// ---------------------------------------------------------------- what is kept

/** Keeps the conversation in the browser, after what is being kept of it already. */
function keep() {
  const kept = talk;
  saving = saving.then(async () => {
    const messages = kept.messages.filter((message) => message.role !== "assistant" || !talks.isEmpty(message));
    if (!store || !isKeeping()) return;
    try {
      if (messages.length) Object.assign(kept, await store.write({ ...kept, messages }));
      else if (kept.updated) await store.remove([kept.id]); // its only message went back to the field
      await sidebar.show(talk.id);
    } catch (error) {
      complain(`The browser could not keep this conversation: ${error.message}`);
    }
  });
  return saving;
}

function setDraft() {
  remember("sessionStorage", "draft", $("prompt").value);
}

/** A new conversation with the settings of this one. */
function freshTalk() {
  return { ...talks.newTalk(), system: $("system").value, tools: $("tools").value };
}

/** Puts another conversation on the page. */
async function turnTo(next) {
  await stop();
  talk = next;
  $("system").value = talk.system;
  $("tools").value = talk.tools;
  list.show(talk.messages);
  list.offerResults(talk.messages);
  complain("");
  clearFigures();
  await sidebar.show(talk.id);
}

async function openKept(id) {
  const kept = await store.read(id);
  if (!kept) return sidebar.show(talk.id); // another tab has deleted it
  await turnTo(kept);
  closePanels();
  $("prompt").focus();
}

async function leave(ids) {
  if (ids.includes(talk.id)) await turnTo(freshTalk());
  return talk.id;
}

// ---------------------------------------------------------------- models, state of the page

function currentModel() {
  return models.find((model) => model.id === $("model").value);
}

async function loadModels() {
  try {
    models = await fetchModels(key());
  } catch (failure) {
    const again = failure.status === 401 ? "" : " The page tries again every few seconds.";
    if (again) setTimeout(loadModels, RETRY_MS);
    return complain(failure.message + again);
  }
  if (!models.length) setTimeout(loadModels, RETRY_MS);
  complain(models.length ? "" : "No model is ready. The page tries again every few seconds.");
  const first = talks.firstModel(models, $("model").value || recall("localStorage", "model"));
  $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (first) $("model").value = first.id;
  modelChanged();
}

function modelChanged() {
  showModel(currentModel());
  showCache(currentModel());
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("log").setAttribute("aria-busy", String(busy));
  if (!busy) return;
  complain("");
  clearFigures();
  $("said").textContent = "Answering";
}

function listen() {
  $("model").addEventListener("change", () => {
    remember("localStorage", "model", $("model").value);
    modelChanged();
  });
  $("clear").addEventListener("click", async () => {
    await turnTo(freshTalk());
    closePanels();
    $("prompt").focus();
  });
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("prompt").value.trim();
    if (text && !running) send(text);
  });
  $("prompt").addEventListener("input", setDraft);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("form").requestSubmit();
    }
  });
  $("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !closePanels()) stop();
  });
  addEventListener("pagehide", () => { if (running) keep(); });
}

async function start() {
  startPanels();
  startSettings(loadModels);
  $("prompt").value = recall("sessionStorage", "draft");
  $("prompt").focus();
  const libraries = await loadLibraries().catch(() => null);
  list = new MessageList($("log"), $("hint"), libraries, ACTIONS);
  store = await openHistory(() => sidebar.show(talk.id));
  sidebar = new Sidebar(store, { open: openKept, leave });
  await sidebar.show(talk.id);
  listen();
  setInterval(() => showCache(currentModel()), KV_EVERY_MS);
  await loadModels();
}

start();
