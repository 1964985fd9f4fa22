"""Procedural CT scans with lesions, written as real DICOM: for tests, the demo and the documentation.

    plan.py            the plan: patients, scans, lengths, blocks of positive slices after the paper's tables
    drawing.py         a canvas in millimetres, soft ellipses, smooth random fields
    head.py, chest.py, abdomen.py, trunk.py   the bodies that are drawn
    lesions.py         lesions and look-alikes
    render.py          from a plan to a volume in HU
    drafts.py          from a volume to images with ids, positions and encodings
    oddities.py        oddities of real datasets, switched on by name
    dicom_writer.py    from images to files
    folder_layouts.py  the paths of files, and the label tables
    dataset.py         the whole dataset, and phantom.json with the truth about it

Import `write_phantom` from `normal_guidance.simulate.phantom.dataset`, which needs pydicom (extra `dicom`); `plan` and
`render` need numpy only.
"""
