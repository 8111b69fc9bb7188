# The image of every node: Ray and this toolkit. Build it from the root of the repository:
#   docker build -f configs/kuberay/image.dockerfile -t rlhf-ray .
FROM python:3.11-slim
RUN pip install --no-cache-dir uv
WORKDIR /rlhf
COPY . .
RUN uv sync --no-dev --extra ray
ENV PATH=/rlhf/.venv/bin:$PATH RAY_USAGE_STATS_ENABLED=0
