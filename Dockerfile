# rl_bridge with vLLM's, SGLang's or no engine: docker build --build-arg EXTRA=vllm .
#
# The other side of the same machine shares memory with it through /proc: run both containers with
# `--pid=container:NAME` of one of them, or give both bridges directory= on a shared tmpfs volume.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim
ARG EXTRA=files
COPY --from=build /wheels /wheels
RUN wheel="$(ls /wheels/*.whl)" && pip install --no-cache-dir "${wheel}[${EXTRA}]" && rm -r /wheels
ENTRYPOINT ["rl-bridge"]
CMD ["doctor"]
