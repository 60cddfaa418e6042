// The line of figures: times and tokens of the latest answer, and the model's KV cache.

const $ = (id) => document.getElementById(id);

/** Removes what was said of another answer. */
export function clearFigures() {
  for (const id of ["ttft", "rate", "tokens", "acceptance"]) $(id).textContent = "–";
  $("acceptance-row").hidden = $("safety-row").hidden = true;
}

/** times: {started, first} in milliseconds, first 0 before the first token. usage: as the API counts it, or null. */
export function showFigures(times, usage) {
  if (times.first) $("ttft").textContent = `${Math.round(times.first - times.started)} ms`;
  if (!usage) return;
  const made = usage.completion_tokens;
  const passed = performance.now() - times.first;
  $("tokens").textContent = `${usage.prompt_tokens} in, ${made} out`;
  if (made > 1 && times.first && passed > 0) $("rate").textContent = (((made - 1) * 1000) / passed).toFixed(1);
  const drafts = usage.completion_tokens_details;
  const accepted = drafts?.accepted_prediction_tokens;
  $("acceptance-row").hidden = accepted === undefined;
  if (accepted === undefined) return;
  const all = accepted + drafts.rejected_prediction_tokens;
  $("acceptance").textContent = all ? `${Math.round((100 * accepted) / all)} % of ${all}` : "none made";
}

export function showSafety(verdict) {
  $("safety-row").hidden = false;
  const why = [verdict.reason, ...(verdict.categories || [])].filter(Boolean).join(", ");
  $("safety").textContent = verdict.flagged ? `flagged: ${why}` : "passed";
}

/** Reads the use of a model's KV cache from the gateway's metrics. */
export async function showCache(card) {
  if (document.hidden || !card) return;
  const reply = await fetch("metrics").catch(() => null);
  const text = reply && reply.ok ? await reply.text() : "";
  const lines = text.split("\n").filter((line) => line.includes(`model="${card.triton_name}"`));
  const value = (family) => Number((lines.find((line) => line.startsWith(`${family}{`)) || "").split(" ").pop());
  const total = value("slipstream_kv_blocks_total");
  $("kv-row").hidden = !total;
  if (!total) return;
  $("kv").value = value("slipstream_kv_blocks_used") / total;
  $("kv-text").textContent = `${Math.round(100 * $("kv").value)} % of ${total} blocks`;
}
