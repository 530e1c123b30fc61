"""Writes the indexes pandas_*.parquet of this folder: pip install pandas pyarrow; python make_pandas_indexes.py"""
import os
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

here = os.path.dirname(os.path.abspath(__file__))
at = lambda name: os.path.join(here, name)


def row(i, path):
    return {
        "data_source": "harbor",
        "prompt": [{"role": "user", "content": path}],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": None},
        "extra_info": {"harbor_task_path": path, "instance_id": f"t{i}", "data_source": "harbor", "index": i},
    }


# Lists of dictionaries, as most scripts write them.
pd.DataFrame([row(0, "tasks/one"), row(1, "tasks/two")]).to_parquet(at("pandas_lists.parquet"), index=False)

# Numpy object arrays, as a frame holds them after it was read back; an index column; categories; only task_path.
frame = pd.read_parquet(at("pandas_lists.parquet"))
assert isinstance(frame["prompt"][0], np.ndarray)
frame["data_source"] = frame["data_source"].astype("category")
frame["extra_info"] = [{"task_path": p[0]["content"], "harbor_task_path": None} for p in frame["prompt"]]
frame.index = ["x", "y"]
frame.to_parquet(at("pandas_arrays.parquet"))

# No extra_info, so that the prompt names the task; large strings and zstd.
table = pa.Table.from_pandas(frame[["prompt"]], preserve_index=False)
item = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
pq.write_table(table.cast(pa.schema([("prompt", pa.large_list(item))])), at("pandas_large.parquet"), compression="zstd")

# Two row groups, dictionary-encoded strings inside the struct, and rows that have no extra_info at all.
infos = pa.StructArray.from_arrays(
    [pa.array(["tasks/two", None, "tasks/one"]).dictionary_encode()],
    names=["harbor_task_path"],
    mask=pa.array([False, True, False]),
)
prompts = pa.array([[{"role": "user", "content": p}] for p in ("unused", "tasks/two", "unused")])
pq.write_table(pa.table({"extra_info": infos, "prompt": prompts}), at("pandas_nulls.parquet"), row_group_size=2)
