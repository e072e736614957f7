# One image for volunteers and bootstrap nodes. Linux on x86_64: libp2p's daemon comes inside hivemind's wheel, which
# exists for that platform only.
#
#   docker build -t spes .
#
# A volunteer (no port needs to be open; leave out --gpus to train on the CPU):
#
#   docker run -it --init --gpus all --stop-timeout 120 -v spes:/data spes --peer ADDRESS
#   docker exec CONTAINER spes status
#
# A bootstrap node (its port must be reachable from the internet; `spes-bootstrap --help` lists its arguments):
#
#   docker run -d --init --network host -v spes-bootstrap:/data --entrypoint spes-bootstrap spes ARGUMENTS
#
# /data is SPES_HOME: the identity (a private key, to be backed up with `spes keys backup`) and every run's directory.

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.11-slim

# Another index to take torch from, such as one that has builds without CUDA for a bootstrap node.
ARG PIP_EXTRA_INDEX_URL

COPY constraints.txt /etc/spes/constraints.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --constraint /etc/spes/constraints.txt /wheel/*.whl && rm -r /wheel

RUN useradd --system --uid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin spes \
    && install --directory --owner=spes --mode=0700 /data

ENV SPES_HOME=/data \
    PYTHONUNBUFFERED=1
VOLUME /data
WORKDIR /data
USER spes

ENTRYPOINT ["spes-join"]
CMD ["--help"]
