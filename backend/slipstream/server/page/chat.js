// The chat page: one conversation, streamed from /v1. Plain script, no build. Text is only ever set as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "frequency_penalty", "max_tokens", "seed"];
const KV_EVERY_MS = 2000;
let models = [];
let messages = [];
let running = null; // the AbortController of the answer that is being made

// ---------------------------------------------------------------- requests

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `The gateway answered ${reply.status}`;
  }
}

function currentModel() {
  return models.find((model) => model.id === $("model").value);
}

function settings() {
  const body = { model: $("model").value, stream: true };
  body.stream_options = { include_usage: true, continuous_usage_stats: true };
  for (const name of NUMBERS) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  if (currentModel().speculative_methods.length) body.speculation = speculation();
  return body;
}

function speculation() {
  if ($("method").value === "none") return { speculative_method: "none" };
  const wish = $("method").value ? { speculative_method: $("method").value } : {};
  if ($("drafts").value !== "") wish.num_draft_tokens = Number($("drafts").value);
  return wish;
}

function request() {
  const system = $("system").value.trim();
  const talk = system ? [{ role: "system", content: system }, ...messages] : messages;
  if (currentModel().has_chat_template) return ["v1/chat/completions", { ...settings(), messages: talk }];
  return ["v1/completions", { ...settings(), prompt: messages[messages.length - 1].content }];
}

async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = body.getReader(); ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

// ---------------------------------------------------------------- one answer

async function ask(text) {
  messages.push({ role: "user", content: text });
  show("user", "You").append(text);
  const box = show("assistant", $("model").value);
  const answer = { text: "", started: performance.now(), first: 0, usage: null, box };
  running = new AbortController();
  setBusy(true);
  clearNumbers();
  try {
    const [path, body] = request();
    const reply = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!reply.ok) throw new Error(await failure(reply));
    for await (const chunk of events(reply.body)) take(answer, chunk);
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
    else note(box, "stopped");
  }
  finish(answer);
}

function take(answer, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices[0];
  const piece = choice ? (choice.delta ? choice.delta.content : choice.text) || "" : "";
  if (piece) {
    answer.first = answer.first || performance.now();
    answer.text += piece;
    answer.box.textContent = answer.text;
    follow();
  }
  if (choice && choice.finish_reason === "length") note(answer.box, "cut at the number of tokens asked for");
  if (choice && choice.finish_reason === "content_filter") note(answer.box, "ended by the safety model");
  answer.usage = chunk.usage || answer.usage;
  if (chunk.safety) showSafety(chunk.safety);
  showNumbers(answer);
}

function finish(answer) {
  running = null;
  setBusy(false);
  answer.box.parentElement.classList.remove("busy");
  if (answer.text) {
    messages.push({ role: "assistant", content: answer.text });
    format(answer.box, answer.text);
    $("said").textContent = `Answer: ${answer.text}`;
  } else {
    messages.pop();
  }
  $("prompt").focus();
}

// ---------------------------------------------------------------- what is seen

function show(role, name) {
  $("hint").hidden = true;
  const article = document.createElement("article");
  article.className = role === "user" ? "user" : "assistant busy";
  const title = document.createElement("h2");
  title.textContent = name;
  const text = document.createElement("div");
  text.className = "text";
  article.append(title, text);
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return text;
}

function follow() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function format(box, text) { // fenced code becomes blocks
  box.replaceChildren(...text.split(/```[^\n]*\n?/).map((part, index) => {
    const node = document.createElement(index % 2 ? "pre" : "span");
    node.textContent = part;
    return node;
  }));
}

function note(box, text) {
  const line = document.createElement("div");
  line.className = "note";
  line.textContent = `(${text})`;
  box.parentElement.append(line);
  follow();
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function clearNumbers() { // those of the answer before
  for (const id of ["ttft", "rate", "tokens", "acceptance"]) $(id).textContent = "–";
  $("acceptance-row").hidden = $("safety-row").hidden = true;
}

function showNumbers(answer) {
  const now = performance.now();
  if (answer.first) $("ttft").textContent = `${Math.round(answer.first - answer.started)} ms`;
  if (!answer.usage) return;
  const made = answer.usage.completion_tokens;
  $("tokens").textContent = `${answer.usage.prompt_tokens} in, ${made} out`;
  if (made > 1 && now > answer.first) $("rate").textContent = (((made - 1) * 1000) / (now - answer.first)).toFixed(1);
  const drafts = answer.usage.completion_tokens_details;
  $("acceptance-row").hidden = !drafts;
  if (!drafts) return;
  const all = drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens;
  $("acceptance").textContent = all ? `${Math.round((100 * drafts.accepted_prediction_tokens) / all)} % of ${all}` : "none made";
}

function showSafety(verdict) {
  $("safety-row").hidden = false;
  const why = [verdict.reason, ...(verdict.categories || [])].filter(Boolean).join(", ");
  $("safety").textContent = verdict.flagged ? `flagged: ${why}` : "passed";
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("log").setAttribute("aria-busy", String(busy));
  if (busy) {
    complain("");
    $("said").textContent = "Answering";
  }
}

// ---------------------------------------------------------------- models, cache, theme

async function loadModels() {
  const reply = await fetch("v1/models", { headers: headers() });
  if (!reply.ok) return complain(await failure(reply));
  complain("");
  models = (await reply.json()).data.filter((model) => model.task !== "embedding");
  $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (!models.length) complain("No model is ready.");
  modelChanged();
}

function modelChanged() {
  const methods = (currentModel() || { speculative_methods: [] }).speculative_methods;
  $("speculation").hidden = !methods.length;
  const choices = [["", "the model's own"], ...methods.map((name) => [name, name]), ["none", "off"]];
  $("method").replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  showCache();
}

async function showCache() {
  if (document.hidden || !currentModel()) return;
  const reply = await fetch("metrics").catch(() => null);
  const text = reply && reply.ok ? await reply.text() : "";
  const mine = text.split("\n").filter((line) => line.includes(`model="${currentModel().triton_name}"`));
  const value = (family) => Number((mine.find((line) => line.startsWith(`${family}{`)) || "").split(" ").pop());
  const total = value("slipstream_kv_blocks_total");
  $("kv-row").hidden = !total;
  if (!total) return;
  $("kv").value = value("slipstream_kv_blocks_used") / total;
  $("kv-text").textContent = `${Math.round(100 * $("kv").value)} % of ${total} blocks`;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

function start() {
  $("key").value = sessionStorage.getItem("key") || "";
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(localStorage.getItem("theme") || (dark ? "dark" : "light"));
  for (const name of ["temperature", "top_p"]) {
    const update = () => { $(`${name}-value`).textContent = $(name).value; };
    $(name).addEventListener("input", update);
    update();
  }
  $("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); loadModels(); });
  $("model").addEventListener("change", modelChanged);
  $("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  });
  $("open-settings").addEventListener("click", () => {
    $("open-settings").setAttribute("aria-expanded", String($("settings").classList.toggle("open")));
  });
  $("clear").addEventListener("click", () => {
    if (running) running.abort();
    messages = [];
    for (const article of $("log").querySelectorAll("article")) article.remove();
    $("hint").hidden = false;
    $("prompt").focus();
  });
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("prompt").value.trim();
    if (!text || running || !currentModel()) return;
    $("prompt").value = "";
    ask(text);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("form").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => running && running.abort());
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
  setInterval(showCache, KV_EVERY_MS);
  loadModels().catch((error) => complain(error.message));
}

start();
