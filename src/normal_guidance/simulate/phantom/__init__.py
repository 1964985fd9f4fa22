"""Procedural CT scans with lesions, written as real DICOM: for tests, the demo and the documentation.

    study.py     the plan: patients, scans, lengths, blocks of positive slices after the paper's tables
    drawing.py   a canvas in millimetres, soft ellipses, smooth random fields
    head.py, chest.py, abdomen.py, trunk.py   what is drawn
    lesions.py   lesions and what looks like them
    render.py    a plan becomes a volume in HU
    drafts.py    a volume becomes images with ids, positions, encodings
    oddities.py  what is odd in real datasets, switched on by name
    dicom.py     images become files
    layouts.py   where files lie, and the label tables
    dataset.py   all of it, and phantom.json: what is true

Import `write_phantom` from `normal_guidance.simulate.phantom.dataset`, which needs pydicom (extra `dicom`); `plan` and
`render` need numpy only.
"""
