# spectune on a CPU:
#   docker build -t spectune .
#   docker run --rm -v "$PWD:/work" spectune tune --pair demo --quick
# What follows a server, without torch:
#   docker build -t spectune-follow --build-arg EXTRAS=postgresql .
FROM python:3.11-slim
ARG EXTRAS=native,search,serve,control,postgresql,parquet
WORKDIR /opt/spectune
COPY . .
# torch from the index of its CPU builds: the usual one brings gigabytes of CUDA along.
RUN case ",$EXTRAS," in *,native,*) \
      pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch ;; \
    esac \
    && pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]" \
    && rm -rf /opt/spectune \
    && install -d -o 1000 /work
WORKDIR /work
ENTRYPOINT ["spectune"]
CMD ["--help"]
