#!/bin/bash
set -e
cd /app
mkdir tulip frost kettle
