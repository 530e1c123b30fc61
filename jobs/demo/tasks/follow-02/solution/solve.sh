#!/bin/bash
set -e
cd /app
cat quartz.txt
mkdir willow
