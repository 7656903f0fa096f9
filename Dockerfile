# Two images, with the versions that the tests were run with.
#
#     docker build --target cpu --tag es-cookbook:cpu .
#     docker build --tag es-cookbook .                     # vLLM and Ray, for NVIDIA GPUs
#     docker run --rm --gpus all --ipc host --volume "$PWD/runs:/workspace/runs" es-cookbook countdown
#
# CUDA itself is in the wheels of torch; the host needs NVIDIA's driver and container toolkit.
#
# Debian keeps one version of a package, so none is named:
# hadolint global ignore=DL3008

FROM python:3.11-slim AS base
# bubblewrap is the sandbox for model-written code. A container must be allowed to make namespaces to use it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src

FROM base AS cpu
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY es_cookbook es_cookbook
# PyTorch's own index has wheels without CUDA.
RUN pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu ".[gguf,plots,serve]"
WORKDIR /workspace
ENTRYPOINT ["es-cookbook"]
CMD ["--help"]

FROM base AS cuda
# Triton and vLLM compile for the GPU that they find; Ray's operator for Kubernetes probes with wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir uv==0.13.9
ENV UV_NO_CACHE=1
COPY pyproject.toml uv.lock README.md LICENSE ./
# Before the package is copied, so that a change to it installs nothing else again.
RUN uv sync --locked --no-install-project --extra vllm --extra gguf --extra plots --extra serve
COPY es_cookbook es_cookbook
# Ray's dashboard, to which jobs are submitted, comes on top.
RUN uv sync --locked --no-editable --extra vllm --extra gguf --extra plots --extra serve \
    && uv pip install "ray[default]"
ENV PATH=/src/.venv/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
ENTRYPOINT ["es-cookbook"]
CMD ["--help"]
