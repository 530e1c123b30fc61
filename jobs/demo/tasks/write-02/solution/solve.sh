#!/bin/bash
set -e
cd /app
echo coral > spruce.txt
