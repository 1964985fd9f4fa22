"""One step of the sweep, compile(vmap(grad_and_value)) of a model, against the same step without the compiler."""

import sys

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from normal_guidance.core.layout import Layout, unpack
from normal_guidance.core.methods import build_model
from normal_guidance.sweep.config import Config


def main(method: str, device: str = "cpu") -> None:
    torch.manual_seed(0)
    torch.set_default_device(device)
    lengths, labels = [5, 1, 33, 12], torch.tensor([0, 1, 1, 0])
    # smtp holds every layer of the transformers, and is compiled with guidance as mhng is.
    classify, term = Config(method).spec.loss, Config("mhng" if method == "smtp" else method).regularizer()
    packed = torch.randn(sum(lengths), 32)
    padded, mask = unpack(packed, torch.tensor(lengths))
    forms = {"padded": (padded, Layout.from_mask(mask))}
    if method == "whole_bells_ng":
        forms["packed"] = (packed, Layout.packed(torch.tensor(lengths)))
    models = [build_model(method, 32) for _ in range(3)]
    stacked, _ = stack_module_state(models)

    def loss(parameters: dict[str, Tensor], features: Tensor, layout: Layout) -> Tensor:
        prediction = functional_call(models[0], parameters, (features, layout))
        value = classify(prediction, labels, None)
        if term is not None:
            value = value + term(prediction.log_attention, lengths=layout, from_logits=True, features=features)
        return value

    step = vmap(grad_and_value(loss), in_dims=(0, None, None))
    for form, (features, layout) in forms.items():
        want, values = step(stacked, features, layout)
        got, compiled_values = torch.compile(step, fullgraph=True)(stacked, features, layout)
        torch.testing.assert_close(compiled_values, values)
        worst = 0.0
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda t, n=name: f"{n}: {t}")
            worst = max(worst, (got[name] - gradient).abs().max().item())
        print(f"{method}, {form}: largest difference {worst:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
