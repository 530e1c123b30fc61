#!/bin/bash
set -e
cd /app
cat frost.txt
mkdir lilac
