# Slipstream on the official Triton Inference Server image.
#   docker build -t slipstream .
#   docker run --gpus all --rm -p 8000:8000 -p 8001:8001 -p 8002:8002 -v /models:/models slipstream
ARG TRITON_TAG=26.07-py3
FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}

# g++ compiles the backend here and, at run time, the launchers of Triton-lang kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slipstream
COPY pyproject.toml constraints.txt README.md ./
COPY backend backend
COPY kernels kernels
COPY build build
COPY model_repository model_repository
COPY models models
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir -c constraints.txt -e . \
 && .venv/bin/python build/assemble.py --backends-dir /opt/tritonserver/backends

EXPOSE 8000 8001 8002
# explicit mode: a model whose engine died is not ready until it is loaded again (docs/operations.md)
CMD ["tritonserver", "--model-repository=/opt/slipstream/model_repository", "--model-control-mode=explicit", "--load-model=llm", "--load-model=preprocessing", "--load-model=postprocessing", "--load-model=ensemble"]
