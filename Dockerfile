# The program on CPU: docker build -t decentjax . && docker run decentjax train quickstart
# On NVIDIA GPUs: docker build --build-arg EXTRAS=train,gpu -t decentjax .
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY decentjax decentjax
COPY train train
COPY configs configs
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG EXTRAS=train
COPY requirements.lock /
RUN --mount=from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /requirements.lock "$(ls /wheels/*.whl)[$EXTRAS]"
RUN useradd --create-home trainer
USER trainer
# Runs write to ./runs: mount a volume there to keep them.
WORKDIR /home/trainer
ENTRYPOINT ["decentjax"]
