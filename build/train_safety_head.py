"""Train the head of the safety model on the labelled texts, and evaluate it on held-out ones.

    .venv/bin/python build/train_safety_head.py  # writes model_repository/safety/head.json
    .venv/bin/python build/train_safety_head.py --model FOLDER_OR_ID  # for another sentence encoder

build/safety_texts has a file per category, and two without any: benign.txt, and lookalike.txt (harmless texts with the
words of harmful ones). Every third line of a file is held out. Thresholds maximise F1 on five-fold scores of the
training texts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from slipstream.encoders.encoder import DEFAULT_MODEL, Encoder, open_encoder
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.policy import read_policy

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "build/safety_texts"
SAFETY = ROOT / "model_repository/safety"
HARMLESS = ("benign", "lookalike")
NUM_FOLDS = 5
WEIGHT_DECAY, SIMILARITY_DECAY = 3e-4, 1e-4  # of 1e-4 to 0.03 the best five-fold F1 on the training texts


def read_texts() -> tuple[list[str], list[str], np.ndarray]:
    """Texts, labels ("" for harmless ones) and which are held out."""
    texts, labels, held_out = [], [], []
    for path in sorted(TEXTS.glob("*.txt")):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        texts += lines
        labels += ["" if path.stem in HARMLESS else path.stem] * len(lines)
        held_out += [number % 3 == 2 for number in range(len(lines))]
    return texts, labels, np.array(held_out)


def similarities(encoder: Encoder, vectors: np.ndarray, names: list[str]) -> np.ndarray:
    """[n, categories]: cosine with the nearest description of each category of the policy."""
    described = {c.name: encoder.embed(c.descriptions)[0] for c in read_policy(SAFETY / "policy.json")}
    return np.stack([(vectors @ described[name].T).max(1) for name in names], axis=1)


def fit(features: np.ndarray, target: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Logistic regression, classes of equal weight; the last feature is the similarity, then comes the bias."""
    x = torch.from_numpy(np.concatenate([features, np.ones((len(features), 1), np.float32)], 1)).double()
    y, d = torch.from_numpy(target).double(), torch.from_numpy(decay).double()
    balance = torch.where(y > 0, len(y) / (2 * y.sum()), len(y) / (2 * (len(y) - y.sum())))
    w = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y, weight=balance) + (d * w[:-1] ** 2).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return w.detach().numpy()


def predict(w: np.ndarray, features: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-(features @ w[:-1] + w[-1])))


def out_of_fold(features: np.ndarray, target: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Scores of each text by a model that did not see it."""
    scores = np.zeros(len(target))
    folds = np.random.default_rng(0).permutation(len(target)) % NUM_FOLDS
    for fold in range(NUM_FOLDS):
        scores[folds == fold] = predict(
            fit(features[folds != fold], target[folds != fold], decay), features[folds == fold]
        )
    return scores


def best_threshold(scores: np.ndarray, target: np.ndarray) -> float:
    """The threshold of maximal F1, midway between two scores, so that rounding does not matter."""
    ordered = np.unique(scores)
    candidates = (ordered[1:] + ordered[:-1]) / 2
    return float(max(candidates, key=lambda threshold: f1(scores >= threshold, target > 0)))


def f1(flagged: np.ndarray, wanted: np.ndarray) -> float:
    return 2 * float((flagged & wanted).sum()) / max(1, int(flagged.sum() + wanted.sum()))


def row(w: np.ndarray, threshold: float) -> dict[str, object]:
    own = {
        "similarity_weight": round(float(w[-2]), 4),
        "bias": round(float(w[-1]), 4),
        "threshold": round(threshold, 4),
    }
    return {**own, **({"weights": [round(float(value), 4) for value in w[:-2]]} if len(w) > 2 else {})}


def report(name: str, flagged: np.ndarray, wanted: np.ndarray) -> None:
    hits = int((flagged & wanted).sum())
    precision, recall = hits / max(1, int(flagged.sum())), hits / max(1, int(wanted.sum()))
    print(f"{name:12} {int(wanted.sum()):4} {precision:9.3f} {recall:7.3f} {f1(flagged, wanted):6.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="a sentence encoder: package:..., folder or Hugging Face id"
    )
    parser.add_argument("--output", type=Path, default=SAFETY / "head.json")
    arguments = parser.parse_args()
    encoder = open_encoder(Parameters({"model": arguments.model}), ROOT, ("sentence",))
    texts, labels, held_out = read_texts()
    vectors, _ = encoder.embed(texts)
    names = sorted(set(labels) - {""})
    near = similarities(encoder, vectors, names)
    decay = np.full(vectors.shape[1] + 1, WEIGHT_DECAY)
    decay[-1] = SIMILARITY_DECAY
    train, rows, verdicts = ~held_out, {}, []
    for index, name in enumerate(names):
        target = np.array([label == name for label in labels], np.float32)
        features = np.concatenate([vectors, near[:, index : index + 1]], 1)
        threshold = best_threshold(out_of_fold(features[train], target[train], decay), target[train])
        w = fit(features[train], target[train], decay)
        rows[name] = row(w, threshold)
        verdicts.append(predict(w, features) >= threshold)
    similarity = fit_similarity(near, names, labels, train)
    head = {"model": arguments.model, "width": vectors.shape[1], "rows": rows, "similarity": similarity}
    arguments.output.write_text(json.dumps(head, separators=(",", ":")) + "\n")
    print_report(names, labels, np.stack(verdicts, 1), held_out)
    print(f"{int(train.sum())} texts trained on, {int(held_out.sum())} held out; wrote {arguments.output}")


def fit_similarity(near: np.ndarray, names: list[str], labels: list[str], train: np.ndarray) -> dict[str, object]:
    """One row for all categories, by similarity only, for categories that a user adds to the policy."""
    target = np.array([[label == name for name in names] for label in labels], np.float32)[train].reshape(-1)
    features, decay = near[train].reshape(-1, 1), np.array([SIMILARITY_DECAY])
    return row(fit(features, target, decay), best_threshold(out_of_fold(features, target, decay), target))


def print_report(names: list[str], labels: list[str], flagged: np.ndarray, held_out: np.ndarray) -> None:
    print("held out:     num precision  recall     F1")
    for index, name in enumerate(names):
        report(name, flagged[held_out, index], np.array([label == name for label in labels])[held_out])
    report("any", flagged.any(1)[held_out], np.array([label != "" for label in labels])[held_out])


if __name__ == "__main__":
    main()
