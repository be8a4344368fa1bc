"""Serve a model to many clients over HTTP, with one engine for all of them.

    pip install fastapi httpx uvicorn
    python examples/serve.py                               # asks itself from several threads, and ends
    uvicorn --app-dir examples serve:make_app --factory   # serves on port 8000

The engine is prepared while the server starts, so no client waits for that. Requests run in the server's
threads and call the one engine; calls take turns. Expect as many right answers as questions, and no plan
made after the start.
"""

import argparse
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import torch_nimble as nimble

try:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from pydantic import BaseModel
except ImportError as reason:
    raise SystemExit(
        f"this example needs FastAPI: pip install fastapi httpx uvicorn ({reason})"
    ) from None

FEATURES, CLASSES, SIZES = 16, 4, [1, 8]


class Question(BaseModel):
    rows: list[list[float]]


class Answer(BaseModel):
    classes: list[int]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)).eval()


def make_app() -> FastAPI:
    model = make_model()
    fast = nimble.compile(model, batch_sizes=SIZES)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        fast.prepare(args=(torch.zeros(1, FEATURES),))
        yield
        fast.close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/classify")
    def classify(question: Question) -> Answer:  # no `async`: it runs in a thread of the server's
        return Answer(classes=fast(torch.tensor(question.rows)).argmax(1).tolist())

    @app.get("/explain")
    def explain() -> dict[str, object]:
        return fast.explain().to_dict()

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--questions", type=int, default=40)
    options = parser.parse_args()

    model = make_model()
    batches = [torch.randn(1 + i % SIZES[-1], FEATURES) for i in range(options.questions)]
    with TestClient(make_app()) as client, ThreadPoolExecutor(options.clients) as clients:

        def ask(rows: torch.Tensor) -> bool:
            reply = client.post("/classify", json={"rows": rows.tolist()})
            return reply.json()["classes"] == model(rows).argmax(1).tolist()

        right = sum(clients.map(ask, batches))
        told = client.get("/explain").json()
    print(f"{right} of {len(batches)} answers are right, from {options.clients} clients at once")
    print(f"{len(told['signatures'])} plans, {len(told['fallbacks'])} fallbacks")


if __name__ == "__main__":
    main()
