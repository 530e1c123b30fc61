#!/bin/bash
set -e
cd /app
mv tulip.txt arrow.txt
