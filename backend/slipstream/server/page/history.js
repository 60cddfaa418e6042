// Conversations in this browser (IndexedDB), the oldest of which give way. Two stores: heads for the list, talks for the rest.

import { newId, titleOf } from "./talk.js";

export const LIMITS = { talks: 100, characters: 10_000_000 };
const HEADS = "heads";
const TALKS = "talks";

/** Ids of the heads that have to go, the oldest first; never that of `kept`. */
export function excess(heads, kept, limits = LIMITS) {
  const oldest = [...heads].sort((one, other) => one.updated - other.updated);
  let number = heads.length;
  let characters = heads.reduce((sum, head) => sum + head.size, 0);
  const ids = [];
  for (const head of oldest) {
    if (number <= limits.talks && characters <= limits.characters) break;
    if (head.id === kept) continue;
    ids.push(head.id);
    number -= 1;
    characters -= head.size;
  }
  return ids;
}

export function headOf(talk) {
  return { id: talk.id, title: titleOf(talk), updated: talk.updated, size: JSON.stringify(talk).length };
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function completion(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export class History {
  #database;
  #channel;

  constructor(database, changed) {
    this.#database = database;
    this.#channel = new BroadcastChannel("slipstream-history"); // other tabs of this page
    this.#channel.onmessage = changed;
  }

  #begin(mode) {
    const transaction = this.#database.transaction([HEADS, TALKS], mode);
    return [transaction, transaction.objectStore(HEADS), transaction.objectStore(TALKS)];
  }

  async #ended(transaction) {
    await completion(transaction);
    this.#channel.postMessage("changed");
  }

  /** Heads, the latest first. */
  async list() {
    const heads = await result(this.#begin("readonly")[1].getAll());
    return heads.sort((one, other) => other.updated - one.updated);
  }

  async read(id) {
    return result(this.#begin("readonly")[2].get(id));
  }

  /** Keeps a conversation and returns its {id, updated}. One that another tab has changed meanwhile gets a new id. */
  async write(talk) {
    const [transaction, heads, talks] = this.#begin("readwrite");
    const stored = await result(heads.get(talk.id));
    const isTheirs = stored && stored.updated !== talk.updated;
    const mark = { id: isTheirs ? newId() : talk.id, updated: Date.now() };
    heads.put(headOf({ ...talk, ...mark }));
    talks.put({ ...talk, ...mark });
    for (const id of excess(await result(heads.getAll()), mark.id)) {
      heads.delete(id);
      talks.delete(id);
    }
    await this.#ended(transaction);
    return mark;
  }

  /** Deletes conversations and returns them. */
  async remove(ids) {
    const [transaction, heads, talks] = this.#begin("readwrite");
    const removed = [];
    for (const id of ids) {
      removed.push(await result(talks.get(id)));
      heads.delete(id);
      talks.delete(id);
    }
    await this.#ended(transaction);
    return removed.filter(Boolean);
  }

  /** Brings deleted conversations back as they were. */
  async restore(removed) {
    const [transaction, heads, talks] = this.#begin("readwrite");
    for (const talk of removed) {
      heads.put(headOf(talk));
      talks.put(talk);
    }
    await this.#ended(transaction);
  }
}

/** The history, or null where the browser keeps nothing (private windows of some). changed: called for other tabs. */
export async function openHistory(changed) {
  try {
    const request = indexedDB.open("slipstream", 1);
    request.onupgradeneeded = () => {
      for (const name of [HEADS, TALKS]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    return new History(await result(request), changed);
  } catch {
    return null;
  }
}
