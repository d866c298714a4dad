# nemo_rl in a container, without or with CUDA; CI builds it where a docker daemon is there.
#
#     docker build --tag nemo-rl:cpu .
#     docker build --tag nemo-rl:cuda --build-arg VARIANT=cuda .
#
# What pip finds for torch is as a rule the build with CUDA, which runs without a GPU too; TORCH_INDEX_URL takes torch
# from another index, for example the one that PyTorch's install page shows for "CPU". Whoever needs a password for an
# index mounts pip's configuration into the build as a secret: arguments stay readable in the image.
ARG VARIANT=cpu
ARG CPU_IMAGE=python:3.12.12-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04

FROM ${CPU_IMAGE} AS cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libibverbs1 make \
    && rm -rf /var/lib/apt/lists/*

# Kernels are compiled at first use, which needs a compiler and Python's headers.
FROM ${CUDA_IMAGE} AS cuda
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libibverbs1 make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM ${VARIANT}
ARG TORCH_INDEX_URL=""
ARG USER_ID=10001
ENV VENV=/opt/nemo_rl/.venv PATH=/opt/nemo_rl/.venv/bin:${PATH} PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid ${USER_ID} nemo && install --directory --owner nemo /opt/nemo_rl
USER nemo
WORKDIR /opt/nemo_rl
# The libraries are a layer of their own: a change of the code does not bring them anew.
COPY --chown=nemo Makefile constraints.txt ./
RUN env ${TORCH_INDEX_URL:+PIP_INDEX_URL=${TORCH_INDEX_URL}} make PYTHON=python3 VENV=${VENV} ${VENV}/.torch
COPY --chown=nemo LICENSE README.md pyproject.toml ./
COPY --chown=nemo nemo_rl nemo_rl
COPY --chown=nemo nemo_rl_tools nemo_rl_tools
RUN make VENV=${VENV} ${VENV}/.base
COPY --chown=nemo configs configs
COPY --chown=nemo examples examples
COPY --chown=nemo benchmarks benchmarks
CMD ["nemo-rl", "--help"]
