"""Texts of any length through a transformer, by one plan for each of a few lengths.

    python examples/text_lengths.py --lengths 16,32,64

Each text is padded to the next of these lengths, and the attention mask says what is padding. Expect a
line for each text with its length and that of its plan, and no more plans than lengths. The model is a
small BERT with random weights, so nothing is downloaded. It needs transformers:
pip install transformers.
"""

import argparse

import torch
from torch import Tensor

import torch_nimble as nimble


def make_model() -> torch.nn.Module:
    try:
        from transformers import BertConfig, BertModel
    except ImportError as reason:
        raise SystemExit(
            f"this example needs transformers: pip install transformers ({reason})"
        ) from None
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    return BertModel(BertConfig(vocab_size=1000, **sizes)).eval()


def padded(tokens: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens with zeros up to the next length, and the mask that says which are real."""
    count = tokens.shape[1]
    target = next((length for length in lengths if length >= count), None)
    if target is None:
        raise ValueError(f"the text has {count} tokens, and the longest plan {lengths[-1]}; cut it")
    mask = (torch.arange(target, device=tokens.device) < count).long().unsqueeze(0)
    return torch.nn.functional.pad(tokens, (0, target - count)), mask


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", default="16,32,64", help="lengths to prepare")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    lengths = sorted(int(part) for part in options.lengths.split(","))

    torch.manual_seed(0)
    model = make_model().to(options.device)
    # A length that was not prepared is a mistake here, and says so.
    with nimble.compile(model, on_new_shape="error", max_graphs=len(lengths)) as fast:
        for length in lengths:
            tokens, mask = padded(
                torch.zeros(1, length, dtype=torch.long, device=options.device), lengths
            )
            fast.prepare(kwargs={"input_ids": tokens, "attention_mask": mask})
        for _ in range(options.texts):
            count = int(torch.randint(1, lengths[-1] + 1, ()))
            text = torch.randint(1000, (1, count), device=options.device)
            tokens, mask = padded(text, lengths)
            ours = fast(input_ids=tokens, attention_mask=mask).last_hidden_state[:, :count]
            alone = model(input_ids=text).last_hidden_state
            error = (ours - alone).norm() / alone.norm()
            print(f"{count} tokens by the plan for {tokens.shape[1]}: relative error {error:.1e}")
        print(f"{len(fast.explain().signatures)} plans, {len(fast.explain().fallbacks)} fallbacks")


if __name__ == "__main__":
    main()
