# Every command of the toolkit; without arguments the server, on port 8000 (docs/docker.md):
#   docker build -t rlhf .
#   docker build -t rlhf-cuda --build-arg DEVICE=cuda --build-arg "EXTRAS=rlhf_serve[vllm]" .
#   docker build -t rlhf-ray --build-arg "EXTRAS=rlhf_algos[ray]" .
FROM python:3.11-slim AS build
ARG UV_VERSION=0.13.9
RUN pip install --no-cache-dir "uv==${UV_VERSION}"
WORKDIR /src
COPY pyproject.toml requirements.lock README.md ./
COPY scripts/docker_install.sh scripts/
COPY packages packages
COPY configs configs
COPY apps apps
ARG DEVICE=cpu
ARG EXTRAS=""
ARG TORCH_CPU="torch==2.13.0+cpu --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN scripts/docker_install.sh /opt/rlhf

FROM python:3.11-slim
ARG DEVICE=cpu
ARG PACKAGES=""
# Kernels that are compiled on a GPU want a C compiler.
RUN wanted="${PACKAGES}"; if [ "${DEVICE}" = cuda ]; then wanted="${wanted} gcc libc6-dev"; fi; \
    if [ -n "${wanted}" ]; then \
        apt-get update && apt-get install -y --no-install-recommends ${wanted} && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 10001 --no-create-home --home-dir /cache rlhf && \
    install -d -o rlhf -g rlhf /cache /work
COPY --from=build /opt/rlhf /opt/rlhf
# All that is written goes to /tmp, /cache and /work; the rest may be read-only.
ENV PATH=/opt/rlhf/bin:${PATH} HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface MPLCONFIGDIR=/cache/matplotlib \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HF_HUB_DISABLE_TELEMETRY=1 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
USER 10001:10001
WORKDIR /work
VOLUME ["/cache", "/work"]
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
CMD ["rlhf-serve", "--host", "0.0.0.0", "--port", "8000"]
