# Normal Guidance for a hospital: `nguide node`, or any other command, in a small image without root.
# docs/howto/docker.md says how to build it, run it, update it, and carry it to a machine without a network.
#
#   PIP_INDEX_URL  your own mirror of Python packages, if any
#   EXTRAS         what the image can do besides training and predicting from features
#   TORCH_INDEX    the address behind --index-url in the command for CPUs on torch's installation page; without it, pip takes the
#                  build with CUDA, which is gigabytes larger
ARG PYTHON=3.11

# The viewer's page.
FROM node:20-slim AS page
WORKDIR /build/frontend
COPY frontend/package.json frontend/package-lock.json ./
RUN npm ci --no-audit --no-fund
COPY frontend/ ./
RUN npm run check && npm run build

# The wheel, and an environment with it and the pinned packages.
FROM python:${PYTHON}-slim AS package
ARG PIP_INDEX_URL
WORKDIR /build
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE CHANGELOG.md CITATION.cff ./
COPY src/ src/
COPY --from=page /build/src/normal_guidance/clinic/viewer/static/ src/normal_guidance/clinic/viewer/static/
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .
ARG EXTRAS=node,encoders
ARG TORCH_INDEX=
RUN python -m venv /opt/nguide \
 && PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" /opt/nguide/bin/python -m pip install --no-cache-dir --no-compile \
    -c constraints.txt "$(ls /dist/*.whl)[${EXTRAS}]" \
 && /opt/nguide/bin/python -m pip uninstall --yes --quiet setuptools pip

FROM python:${PYTHON}-slim
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/nguide nguide \
 && install -d -o nguide -g nguide -m 700 /var/lib/nguide \
 && install -d -o nguide -g nguide -m 755 /models \
 && install -d -o nguide -g nguide -m 1777 /models/cache
COPY --from=package /opt/nguide /opt/nguide
ENV PATH=/opt/nguide/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MPLBACKEND=Agg \
    MPLCONFIGDIR=/tmp/matplotlib \
    NGUIDE_CACHE=/models/cache
USER nguide
WORKDIR /var/lib/nguide
# The model with node.toml and the encoder's weights, which any user may use (docker run --user); the node's queue, files and audit log,
# which are patients' data.
VOLUME ["/models", "/var/lib/nguide"]
# DICOM; the status page, /status.json and /health.
EXPOSE 11112 8112
# Prints what /health says, also where it is 503; `docker inspect` shows it.  The opener knows no proxy.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; o = u.OpenerDirector(); o.add_handler(u.HTTPHandler()); \
r = o.open('http://127.0.0.1:8112/health', timeout=8); print(r.read().decode()); raise SystemExit(r.status != 200)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["nguide"]
CMD ["node", "/var/lib/nguide", "--settings", "/models/node.toml"]
