// The messages of a conversation as elements: text, folded reasoning and calls, and what can be done with each.
// Text of models reaches the document as text nodes or through markdown.js, never otherwise.

import { MarkdownView, copyButton } from "./markdown.js";
import { openCalls } from "./talk.js";

function make(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function button(text, className, clicked) {
  const node = make("button", className, text);
  node.type = "button";
  node.addEventListener("click", clicked);
  return node;
}

function fold(className, title) {
  const node = make("details", className);
  const summary = make("summary", "", title);
  const body = make("div", "folded");
  body.tabIndex = 0;
  node.append(summary, body);
  return { node, summary, body };
}

/** An answer's element, which update() brings up to date with its message. */
class AnswerView {
  #message;
  #text;
  #markdown;
  #parts;
  #reasoning = null;
  #calls = [];

  constructor(article, message, libraries) {
    this.#message = message;
    this.#parts = make("div");
    this.#text = make("div", "text");
    this.#markdown = new MarkdownView(this.#text, libraries);
    article.append(this.#parts, this.#text);
    this.article = article;
  }

  update(isFinal) {
    const { content, reasoning, calls } = this.#message;
    if (reasoning) this.#showReasoning(reasoning, isFinal || Boolean(content));
    calls.forEach((call, index) => this.#showCall(call, index));
    this.#markdown.update(content, isFinal);
  }

  #showReasoning(text, isDone) {
    if (!this.#reasoning) {
      this.#reasoning = fold("reasoning", "");
      this.#parts.append(this.#reasoning.node);
    }
    this.#reasoning.summary.textContent = isDone ? "Reasoning" : "Reasoning…";
    this.#reasoning.body.textContent = text;
  }

  #showCall(call, index) {
    if (!this.#calls[index]) {
      this.#calls[index] = fold("call", "");
      this.article.insertBefore(this.#calls[index].node, this.#text.nextSibling);
    }
    this.#calls[index].summary.textContent = `Calls ${call.name}`;
    this.#calls[index].body.textContent = indented(call.arguments);
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not all of it is there
  }
}

function addNote(article, message) {
  if (message.note) article.querySelector(".actions").before(make("p", "note", `(${message.note})`));
}

/** actions: regenerate(), edit(message, text), results(texts). */
export class MessageList {
  #log;
  #hint;
  #libraries;
  #actions;
  #shown = []; // {message, article, view}

  constructor(log, hint, libraries, actions) {
    this.#log = log;
    this.#hint = hint;
    this.#libraries = libraries;
    this.#actions = actions;
  }

  /** Shows these messages; elements of messages that were shown already stay. */
  show(messages) {
    let same = 0;
    while (same < messages.length && same < this.#shown.length && this.#shown[same].message === messages[same]) same += 1;
    for (const { article } of this.#shown.splice(same)) article.remove();
    for (const message of messages.slice(same)) this.#append(message);
    this.#hint.hidden = messages.length > 0;
    this.#log.querySelector(".results")?.remove();
  }

  #append(message) {
    const article = make("article", message.role);
    const names = { user: "You", tool: `Result of ${message.name}`, assistant: message.model };
    article.append(make("h2", "", names[message.role]));
    const shown = { message, article, view: null };
    if (message.role === "assistant") shown.view = this.#appendAnswer(article, message);
    else if (message.role === "tool") this.#appendResult(article, message);
    else this.#appendQuestion(article, message);
    this.#shown.push(shown);
    this.#log.append(article);
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #appendAnswer(article, message) {
    const view = new AnswerView(article, message, this.#libraries);
    view.update(true);
    const actions = make("div", "actions");
    actions.append(copyButton("Copy", () => message.content));
    actions.append(button("Regenerate", "last-only", () => this.#actions.regenerate()));
    article.append(actions);
    addNote(article, message);
    return view;
  }

  #appendResult(article, message) {
    const result = fold("call", "Text");
    result.body.textContent = message.content;
    article.append(result.node);
  }

  #appendQuestion(article, message) {
    const actions = make("div", "actions");
    actions.append(button("Edit", "", () => this.edit(message, message.content)));
    actions.append(button("Answer it", "last-only", () => this.#actions.regenerate()));
    article.append(make("div", "text plain", message.content), actions);
  }

  /** Marks the last answer as being made. Returns what draws it again: update() at the next frame, end() at its end. */
  begin() {
    const { message, view, article } = this.#shown[this.#shown.length - 1];
    const log = this.#log;
    let frame = 0;
    const draw = (isFinal) => {
      frame = 0;
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
      view.update(isFinal);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    };
    article.classList.add("busy");
    return {
      update: () => { frame ||= requestAnimationFrame(() => draw(false)); },
      end: () => {
        cancelAnimationFrame(frame);
        article.classList.remove("busy");
        draw(true);
        addNote(article, message);
      },
    };
  }

  /** Opens a message for editing, with this text in its field. */
  edit(message, text) {
    const { article } = this.#shown.find((shown) => shown.message === message);
    const old = [...article.children].slice(1);
    const form = make("form", "edit");
    const field = make("textarea");
    const close = () => { form.replaceWith(...old); };
    const submit = () => {
      close();
      if (field.value.trim()) this.#actions.edit(message, field.value.trim());
    };
    field.value = text;
    field.rows = Math.min(12, text.split("\n").length + 1);
    field.setAttribute("aria-label", "Your message, edited");
    const cancel = button("Cancel", "", close);
    const send = make("button", "", "Send again");
    form.append(field, send, cancel);
    form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
      if (event.key === "Escape") { event.stopPropagation(); close(); }
    });
    for (const node of old) node.remove();
    article.append(form);
    field.focus();
  }

  /** Offers a field for the result of each call that waits for one. */
  offerResults(messages, texts = []) {
    const calls = openCalls(messages);
    this.#log.querySelector(".results")?.remove();
    if (!calls.length) return;
    const form = make("form", "results");
    const fields = calls.map((call, index) => {
      const label = make("label", "", `Result of ${call.name}`);
      const field = make("textarea");
      field.rows = 2;
      field.value = texts[index] || "";
      label.append(field);
      form.append(label);
      return field;
    });
    form.append(make("button", "", "Send the results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#actions.results(fields.map((field) => field.value));
    });
    this.#log.append(form);
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}
