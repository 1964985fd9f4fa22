"""ViT-B/16 through our loader equals torchvision's `vit_b_16` with the same random weights.

Skipped without torchvision.  Needs torch, transformers and pytest beside it, and nothing else:
    PYTHONPATH=src python3 -m pytest --noconftest -p no:cacheprovider tests/scans/features/test_vit_torchvision.py
"""

import pytest
import torch

try:
    from torchvision.models import vit_b_16
except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision of another torch
    pytest.skip(f"torchvision does not import: {error}", allow_module_level=True)

from normal_guidance.scans.features.encoders import HEADS, build_vit, torchvision_weights

TOLERANCE = 1e-5
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    """Every parameter random: torchvision's own start has zeros in the class token, biases and classifier."""
    torch.manual_seed(0)
    model = vit_b_16(weights=None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.02
            parameter.copy_(1 + noise if "ln" in name and name.endswith("weight") else noise)
    model.heads = torch.nn.Identity()
    return model.eval()


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [1, 3])
def test_vit_b_16_is_torchvisions(theirs, device, channels):
    gray = torch.randn(4, 1, 224, 224, generator=torch.Generator().manual_seed(1)).to(device)
    rgb = gray.repeat(1, 3, 1, 1)
    if channels == 3:
        rgb = rgb + torch.randn(rgb.shape, generator=torch.Generator().manual_seed(2)).to(device)
    ours = build_vit(torchvision_weights(theirs.state_dict(), channels), HEADS).to(device)
    with torch.no_grad():
        expected = theirs.to(device)(rgb)
        found = ours(pixel_values=gray if channels == 1 else rgb).last_hidden_state[:, 0]
    worst = float((found - expected).abs().max())
    print(f"{device}, {channels} channels: features of sd {float(expected.std()):.2f} differ by at most {worst:.1e}")
    assert expected.shape == (4, 768)
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3  # they depend on the image at all
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
