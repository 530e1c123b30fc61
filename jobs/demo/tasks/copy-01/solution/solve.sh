#!/bin/bash
set -e
cd /app
cp sugar.txt otter
