// Requests to the gateway: the stream of an answer, and failures as sentences. Knows nothing of the document.

export const GONE = "The server is gone: it has stopped, or the network is down.";
export const BROKEN_OFF = "The connection broke off in the middle of the answer.";

/** What went wrong, as a sentence. status: 0 if nobody answered. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function sentence(text) {
  const told = text.trim();
  return /[.!?]$/.test(told) ? told : `${told}.`;
}

/** The sentence for a refusal. said: the server's words, if it had any. retryAfter: seconds, as its header says. */
export function explain(status, said, retryAfter, hasKey) {
  if (status === 401) {
    return hasKey ? "The server does not accept this API key." : "The server wants an API key: enter it under Settings.";
  }
  const words = said ? sentence(said) : `The server answered with the status ${status}.`;
  const seconds = Number(retryAfter);
  if ([429, 503].includes(status) && seconds > 0) return `${words} Try again in ${Math.ceil(seconds)} s.`;
  return words;
}

async function failure(reply, hasKey) {
  let said = "";
  try {
    said = String((await reply.json()).error.message);
  } catch {
    // not the gateway: a proxy, perhaps
  }
  return new Failure(explain(reply.status, said, reply.headers.get("retry-after"), hasKey), reply.status);
}

async function ask(path, options, key) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(GONE);
  }
  if (!reply.ok) throw await failure(reply, Boolean(key));
  return reply;
}

/** The models that generate text. */
export async function fetchModels(key) {
  const reply = await ask("v1/models", {}, key);
  return (await reply.json()).data.filter((model) => model.task === "generate");
}

/** Splits a stream's text into the data of its events; what is left over comes with the next text. */
export class EventSplitter {
  #rest = "";

  feed(text) {
    const parts = (this.#rest + text).split("\n\n");
    this.#rest = parts.pop();
    return parts.filter((part) => part.startsWith("data: ")).map((part) => part.slice(6));
  }
}

/** The chunks of one answer, which ends with [DONE]. Throws Failure, and AbortError when signal says so. */
export async function* stream(path, body, key, signal) {
  const reply = await ask(path, { method: "POST", body: JSON.stringify(body), signal }, key);
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  const splitter = new EventSplitter();
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(BROKEN_OFF);
    }
    if (part.done) throw new Failure(BROKEN_OFF);
    for (const data of splitter.feed(decoder.decode(part.value, { stream: true }))) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(sentence(String(chunk.error.message)), 200);
      yield chunk;
    }
  }
}
