// One conversation as data: its messages, what of them is sent, and how chunks make an answer. Knows nothing of the document.

const TITLE_CHARS = 60;
const ENDS = {
  length: "cut at the number of tokens asked for",
  content_filter: "ended by the safety model",
  timeout: "ended by the time limit",
};

export function newId() { // randomUUID is missing on plain http pages of another machine
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** messages: of the roles user, assistant and tool, never changed in place but for the answer that is being made. */
export function newTalk() {
  return { id: newId(), messages: [], system: "", tools: "", updated: 0 };
}

export function titleOf(talk) {
  const first = talk.messages.find((message) => message.role === "user");
  const text = (first ? first.content : "").trim().replace(/\s+/g, " ");
  return text.length > TITLE_CHARS ? `${text.slice(0, TITLE_CHARS - 1)}…` : text || "Empty conversation";
}

export function userMessage(content) {
  return { role: "user", content };
}

export function newAnswer(model) {
  return { role: "assistant", model, content: "", reasoning: "", calls: [], note: "" };
}

export function isEmpty(answer) {
  return !answer.content && !answer.reasoning && !answer.calls.length && !answer.note;
}

/** The messages before the last answer, which a new answer follows. */
export function withoutLastAnswer(messages) {
  const last = messages[messages.length - 1];
  return last && last.role === "assistant" ? messages.slice(0, -1) : messages;
}

/** Calls of the last answer, which wait for the results of their tools. */
export function openCalls(messages) {
  const last = messages[messages.length - 1];
  return last && last.role === "assistant" ? last.calls : [];
}

export function toolResults(calls, results) {
  return calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, name: call.name, content: results[index] }));
}

/** The list of tools that a text holds, undefined for an empty one. Throws Error with a sentence. */
export function parseTools(text) {
  if (!text.trim()) return undefined;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools (under Settings) are not JSON: ${error.message}.`);
  }
  if (!Array.isArray(tools)) throw new Error("The tools (under Settings) are no JSON list.");
  return tools.length ? tools : undefined;
}

function forServer(message) {
  if (message.role !== "assistant") return message;
  const call = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });
  const calls = message.calls.length ? { tool_calls: message.calls.map(call) } : {};
  return { role: "assistant", content: message.content, ...calls }; // models are not shown their own reasoning again
}

/** [path, body] of the request. settings: fields of the API. Without a chat template the last message is the prompt. */
export function toRequest(talk, card, settings) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const body = { model: card.id, stream: true, stream_options: options, ...settings };
  if (!card.has_chat_template) {
    const asked = talk.messages.findLast((message) => message.role === "user");
    return ["v1/completions", { ...body, prompt: asked.content }];
  }
  const system = talk.system.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...talk.messages.map(forServer)];
  const tools = parseTools(talk.tools);
  return ["v1/chat/completions", { ...body, messages, ...(tools ? { tools } : {}) }];
}

function addCall(calls, part) {
  const call = (calls[part.index] ??= { id: "", name: "", arguments: "" });
  const named = part.function || {};
  call.id ||= part.id || "";
  call.name ||= named.name || "";
  call.arguments += named.arguments || "";
}

/** Adds a chunk to an answer. Returns whether it had text, reasoning or a call. */
export function addChunk(answer, chunk) {
  const choice = chunk.choices[0];
  if (!choice) return false;
  const delta = choice.delta || { content: choice.text };
  const reasoning = delta.reasoning_content || delta.reasoning || "";
  answer.content += delta.content || "";
  answer.reasoning += reasoning;
  for (const part of delta.tool_calls || []) addCall(answer.calls, part);
  answer.note = ENDS[choice.timed_out ? "timeout" : choice.finish_reason] || answer.note;
  return Boolean(delta.content || reasoning || delta.tool_calls);
}

/** The model to begin with: the one that was chosen last, else one whose answers no safety model may withhold. */
export function firstModel(cards, remembered) {
  const chosen = cards.find((card) => card.id === remembered);
  const plain = cards.filter((card) => !card.has_safety);
  return chosen || plain.find((card) => card.has_chat_template) || plain[0] || cards[0];
}
