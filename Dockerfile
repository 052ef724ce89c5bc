# The HTTP server with compiled kernels. First, with a network: the wheels of the pinned versions, this project's among them.
#
#   docker run --rm --volume "$PWD:/source" --workdir /source python:3.12 pip wheel --wheel-dir wheels \
#       --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[server]"
#   docker pull python:3.12-slim
#
# Then, without one:
#
#   docker build --network none --tag rollout-engine .
#   docker run --publish 127.0.0.1:8000:8000 --volume /path/of/models:/models:ro rollout-engine \
#       serve /models/MODEL --host 0.0.0.0 --api-key KEY --admin-key OTHER_KEY

FROM python:3.12-slim
RUN --mount=type=bind,source=wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir --no-index --find-links /wheels --constraint /constraints.txt "rollout-engine[server]"
RUN useradd --create-home engine
USER engine
ENTRYPOINT ["rollout-engine"]
CMD ["doctor"]
