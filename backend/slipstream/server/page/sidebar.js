// The list of kept conversations: open one, delete one or all, take a deletion back.

const $ = (id) => document.getElementById(id);

/** history: null where the browser keeps nothing. actions: open(id); leave(ids) before these are deleted, which
 *  returns the id of the conversation that is then on the page. */
export class Sidebar {
  #history;
  #actions;
  #removed = [];

  constructor(history, actions) {
    this.#history = history;
    this.#actions = actions;
    if (!history) $("history-note").textContent = "This browser keeps no conversations for this page: they end with the tab.";
    $("delete-all").addEventListener("click", () => this.#deleteAll());
    $("undo").addEventListener("click", () => this.#undo());
  }

  /** Shows the list; `current` is the id of the conversation on the page. */
  async show(current) {
    if (!this.#history) return;
    const heads = await this.#history.list();
    $("history-note").textContent = heads.length ? "" : "Conversations appear here. They stay in this browser.";
    $("talks").replaceChildren(...heads.map((head) => this.#item(head, head.id === current)));
    $("delete-all").hidden = heads.length === 0;
    $("undo").hidden = this.#removed.length === 0;
  }

  #item(head, isCurrent) {
    const item = document.createElement("li");
    const open = document.createElement("button");
    open.type = "button";
    open.className = "open-talk";
    open.textContent = head.title;
    open.title = new Date(head.updated).toLocaleString();
    if (isCurrent) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.#actions.open(head.id));
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "delete-talk";
    remove.textContent = "×";
    remove.title = "Delete";
    remove.setAttribute("aria-label", `Delete the conversation ${head.title}`);
    remove.addEventListener("click", () => this.#delete([head.id]));
    item.append(open, remove);
    return item;
  }

  async #deleteAll() {
    if (!confirm("Delete all conversations that this browser keeps for this page?")) return;
    await this.#delete((await this.#history.list()).map((head) => head.id));
  }

  async #delete(ids) {
    const current = await this.#actions.leave(ids);
    this.#removed = await this.#history.remove(ids);
    await this.show(current);
    $("undo").focus();
  }

  async #undo() {
    await this.#history.restore(this.#removed);
    this.#removed = [];
    await this.show(await this.#actions.leave([]));
  }
}
