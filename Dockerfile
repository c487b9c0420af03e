# syntax=docker/dockerfile:1
# Three images out of one file:
#   docker build --target router -t disagg-router:0.1.0 .     the router
#   docker build --target engine -t disagg-engine:0.1.0 .     vLLM 0.32 with our connector
#   docker build --target reference -t disagg-reference:0.1.0 .   the small engine, for trying it out
# Packages are those of constraints.txt. To pin the bases by content as well, name them with a digest:
#   --build-arg PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

# Our package as a wheel: the only thing of this directory that later stages take.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY constraints.txt ./
RUN python -m venv /build && \
    /build/bin/pip install --no-cache-dir --constraint constraints.txt \
        hatchling==1.33.0 trove-classifiers==2026.9.21.13
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY engine_ext engine_ext
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS router-install
COPY constraints.txt /
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/disagg && \
    wheel=$(echo /wheels/*.whl) && \
    /opt/disagg/bin/pip install --no-cache-dir --only-binary :all: --constraint /constraints.txt \
        "${wheel}[dns,kubernetes,otel]" && \
    /opt/disagg/bin/pip check

FROM ${PYTHON_IMAGE} AS reference-install
COPY constraints.txt /
COPY --from=wheel /wheels /wheels
# A CPU build of torch is a tenth of the size: --build-arg TORCH_INDEX=... names an index that has it.
ARG TORCH_INDEX=
RUN python -m venv /opt/disagg && \
    wheel=$(echo /wheels/*.whl) && \
    /opt/disagg/bin/pip install --no-cache-dir --only-binary :all: --constraint /constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} "${wheel}[engine]" && \
    /opt/disagg/bin/pip check

# vLLM as it is, and beside it what it lacks. Its own packages stay what they were: no dependencies.
FROM ${VLLM_IMAGE} AS engine
COPY --from=wheel /wheels /wheels
RUN uv pip install --system --no-cache --no-deps \
        nixl==1.5.1 nixl-cu12==1.5.1 nixl-cu13==1.5.1 /wheels/*.whl && \
    python3 -c "from engine_ext.vllm import DisaggConnector" && \
    install -d -o 10001 -g 10001 /cache
# Without a name torch fails to name its cache.
ENV USER=disagg HOME=/cache HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache
WORKDIR /cache
USER 10001:10001
EXPOSE 8000 5600
ENTRYPOINT ["vllm", "serve"]

FROM ${PYTHON_IMAGE} AS reference
COPY --from=reference-install /opt/disagg /opt/disagg
RUN install -d -o 10001 -g 10001 /cache
ENV PATH=/opt/disagg/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=disagg HOME=/cache
WORKDIR /cache
USER 10001:10001
EXPOSE 8000 5600
ENTRYPOINT ["disagg-engine"]

# Last, so that a plain `docker build .` makes it.
FROM ${PYTHON_IMAGE} AS router
COPY --from=router-install /opt/disagg /opt/disagg
ENV PATH=/opt/disagg/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 8001
ENTRYPOINT ["disagg-router"]
CMD ["--host", "0.0.0.0", "--liveness-port", "8001"]
