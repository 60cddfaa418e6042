"""POST /v1/score and /v1/rerank: how near texts are, by the cosine of their embeddings (vLLM's and Jina's forms).

The encoders are those of /v1/embeddings. A cross-encoder would judge pairs better; none is served.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest

from slipstream.server.embeddings import embed_texts
from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.schemas import RerankRequest, ScoreRequest


async def score(gateway: Gateway, request: ScoreRequest, http: HttpRequest) -> dict[str, Any]:
    """Each text_1 with the text_2 of its place; one text_1 with every text_2."""
    firsts, seconds = ([texts] if isinstance(texts, str) else texts for texts in (request.text_1, request.text_2))
    if len(firsts) not in (1, len(seconds)):
        accepted = f"accepted: 1 text, or {len(seconds)} as in text_2"
        raise ApiError(400, f"text_1: has {len(firsts)} texts, {accepted}", param="text_1")
    vectors, num_tokens = await embed_texts(gateway, request.model, [*firsts, *seconds], http, "text_1, text_2")
    cosines = _cosines(vectors[: len(firsts)], vectors[len(firsts) :])
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(cosines)]
    head = {"id": f"score-{request.request_id}", "object": "list", "created": int(time.time()), "model": request.model}
    return {**head, "data": data, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}


async def rerank(gateway: Gateway, request: RerankRequest, http: HttpRequest) -> dict[str, Any]:
    """The documents by falling relevance to the query, the top_n first ones."""
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    vectors, num_tokens = await embed_texts(gateway, request.model, [request.query, *texts], http, "query, documents")
    cosines = _cosines(vectors[:1], vectors[1:])
    ranked = sorted(range(len(texts)), key=lambda index: -cosines[index])[: request.top_n or len(texts)]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": cosines[index]} for index in ranked]
    if request.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"id": f"rerank-{request.request_id}", "model": request.model, "usage": usage, "results": results}


def _cosines(firsts: np.ndarray, seconds: np.ndarray) -> list[float]:
    """firsts: [1 or N, D]; seconds: [N, D]. A vector of zeros is near nothing."""
    norms = np.linalg.norm(firsts, axis=1) * np.linalg.norm(seconds, axis=1)
    products = (firsts * seconds).sum(axis=1)
    return np.divide(products, norms, out=np.zeros_like(products), where=norms > 0).tolist()
