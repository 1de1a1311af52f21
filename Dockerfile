# spectune on a CPU:
#   docker build -t spectune .
#   docker run --rm -v "$PWD:/work" spectune tune --pair demo --quick
FROM python:3.11-slim
WORKDIR /opt/spectune
COPY . .
# torch from the index of its CPU builds: the usual one brings gigabytes of CUDA along.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch \
    && pip install --no-cache-dir -c constraints.txt '.[native,search,serve,control,postgresql,parquet]' \
    && rm -rf /opt/spectune
WORKDIR /work
ENTRYPOINT ["spectune"]
CMD ["--help"]
