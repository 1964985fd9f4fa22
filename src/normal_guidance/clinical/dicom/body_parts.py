"""What DICOM knows of a BodyPartExamined (PS3.16, annex L): its code, and whether there is a left and a right one."""

from __future__ import annotations

from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code

OTHERS = {
    "ABDOMENPELVIS": codes.cid4031.AbdomenAndPelvis,
    "BRAIN": codes.SCT.Brain,
    "CHESTABDOMEN": codes.cid4031.ChestAndAbdomen,
    "CHESTABDPELVIS": codes.cid4031.ChestAbdomenAndPelvis,
    "CSPINE": codes.cid4031.CervicalSpine,
    "HEADNECK": codes.cid4031.HeadAndNeck,
    "LIVER": codes.SCT.Liver,
    "LSPINE": codes.cid4031.LumbarSpine,
    "LUNG": codes.SCT.Lung,
    "TSPINE": codes.cid4031.ThoracicSpine,
}
"""Terms that are not the names of the codes in CID 4031."""

UNPAIRED = frozenset(
    {
        *("ABDOMEN", "ABDOMENPELVIS", "AORTA", "BLADDER", "BRAIN", "CERVIX", "CHEST", "CHESTABDOMEN"),
        *("CHESTABDPELVIS", "CIRCLEOFWILLIS", "COCCYX", "COLON", "CORONARYARTERY", "CSPINE", "CTSPINE", "DUODENUM"),
        *("ESOPHAGUS", "FACE", "GALLBLADDER", "HEAD", "HEADNECK", "HEART", "ILEUM", "ILIUM", "JAW", "JEJUNUM"),
        *("LARYNX", "LIVER", "LSPINE", "LSSPINE", "MAXILLA", "MEDIASTINUM", "MOUTH", "NECK", "NECKCHEST"),
        *("NECKCHESTABDOMEN", "NECKCHESTABDPELV", "NOSE", "PANCREAS", "PELVIS", "PENIS", "PHARYNX", "PROSTATE"),
        *("RECTUM", "SKULL", "SPINE", "SPLEEN", "SSPINE", "STERNUM", "STOMACH", "THYMUS", "THYROID", "TLSPINE"),
        *("TONGUE", "TRACHEA", "TSPINE", "URETER", "URETHRA", "UTERUS", "VAGINA", "VULVA", "WHOLEBODY"),
    }
)
"""Body parts of which images must not have a Laterality; all others must have one, which may be empty."""

_REGIONS = {name.upper(): code for name, code in codes.cid4031.concepts.items()} | OTHERS


def body_part_code(term: str) -> Code | None:
    """The SNOMED CT code of a body part; None where pydicom's tables know none."""
    return _REGIONS.get(term)
